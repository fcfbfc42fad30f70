"""GPU sharing: MPS lanes, time slicing and detection of foreign processes."""
