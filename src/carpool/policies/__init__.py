"""Decision rules, one file each; looked up by name without importing what is heavy."""
