"""Worker processes: fork server, worker pools, channels, the worker protocol, start and cleanup."""
