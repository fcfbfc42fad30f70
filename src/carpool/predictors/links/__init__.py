"""Throughput over network links: fabric, transfers, step-time model, fit and estimators."""
