"""Training on real devices: executor, worker processes and the training engine; the only package that imports torch."""
