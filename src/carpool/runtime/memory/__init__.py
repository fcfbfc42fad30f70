"""Device memory under a cap: which jobs stay on a device and which are swapped out."""
