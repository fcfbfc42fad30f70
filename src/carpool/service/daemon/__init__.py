"""Daemon: the scheduling loop, its bootstrap and crash recovery, and its background tasks."""
