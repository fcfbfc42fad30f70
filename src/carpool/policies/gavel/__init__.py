"""Gavel: time shares on heterogeneous devices from linear programs, executed in rounds."""
