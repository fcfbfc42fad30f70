"""The same trainings as entries of carpool."""

import torch
from parts import find

from carpool import Stop, Training


def train(name: str, steps: int) -> Training:
    """A training by name."""
    torch.manual_seed(0)
    parts = find(name)
    return Training(
        parts.model, parts.optimizer, parts.data, parts.loss, parts.batch_size, Stop(steps=steps), step=parts.step
    )
