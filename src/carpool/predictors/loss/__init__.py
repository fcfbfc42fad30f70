"""Learning progress: loss curves, gradient noise scale and goodput."""
