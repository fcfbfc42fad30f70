"""Loss-phase: elastic allocation by the learning progress read from loss curves."""
