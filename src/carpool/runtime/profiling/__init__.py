"""Profiler: measures throughput, memory and gradient noise of a training in worker processes."""
