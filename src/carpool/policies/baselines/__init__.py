"""Baseline policies from the literature: FIFO, SJF, SRTF, LAS, AFS, AlloX, Optimus, Themis and Pollux."""
