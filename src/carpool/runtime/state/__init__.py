"""Training state outside the device: checkpoints on disk and mirrors in shared memory."""
