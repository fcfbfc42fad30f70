"""Grounds on which policies meet: one file each, found by name. Each has a `GROUND`."""
