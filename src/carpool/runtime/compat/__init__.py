"""Bindings to the operating system, the NVIDIA driver and private torch APIs."""
