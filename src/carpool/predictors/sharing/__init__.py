"""Throughput of trainings that share devices: measured co-location and interference models."""
