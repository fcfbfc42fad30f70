"""Discrete-event simulator: runs the live scheduler against a simulated backend and a model of true performance."""
