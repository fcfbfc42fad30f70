"""Scheduler state: jobs by phase, device map, job order, reconciliation and state snapshots."""
