"""Durable store: journal records in SQLite and in an append-only accept log, integrity check and backup."""
