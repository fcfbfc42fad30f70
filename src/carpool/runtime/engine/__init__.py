"""Training engine: one step of a training on one device: forward, backward, reduction layout, optimizer."""
