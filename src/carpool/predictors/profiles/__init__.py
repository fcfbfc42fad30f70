"""Job profiles: measurements, their files, and the rate, step-time and memory models fitted to them."""
