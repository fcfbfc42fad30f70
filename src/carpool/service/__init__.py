"""Scheduler service: a long-running daemon with a durable store, an HTTP API, and a client for it."""
