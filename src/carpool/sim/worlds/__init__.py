"""Truths to simulate in: measured throughput tables, recorded trainings."""
