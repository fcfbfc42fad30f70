"""Commands: any program as a job, started, parked, observed and ended."""
