"""Gradient reduction across the ranks of a job: shard tree, shared-memory and process-group reducers."""
