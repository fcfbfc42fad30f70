"""What several verbs share: daemon access, run lookup, JSON output, and the web application of ``serve``."""
