"""Hare: a linear relaxation that prices devices, and the allocation derived from it."""
