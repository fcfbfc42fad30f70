"""Training on real devices: the only package that imports torch."""
