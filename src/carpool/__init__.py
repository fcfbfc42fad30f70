"""carpool lets many deep-learning training jobs share GPUs, so that all finish sooner and none learns differently."""

__version__ = "0.1.0"
