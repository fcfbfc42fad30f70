"""Workloads for comparing policies, one file each with a `GROUND`."""
