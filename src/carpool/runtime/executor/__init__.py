"""Executor: the process on a machine that launches jobs and carries out the scheduler's orders."""
