"""Federated learning of several tasks at once: rounds, work per device, aggregation. Pure: no clock, no torch."""
