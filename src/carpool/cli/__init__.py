"""The command line: one file per verb; imports what is heavy only where it is used."""
