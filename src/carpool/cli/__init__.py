"""Command line: the verbs, their terminal output, and what verbs share; heavy modules are imported only where used."""
