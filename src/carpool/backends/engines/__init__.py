"""Engines: how the machines of a fleet are found, their agents started and ended."""
