"""The gradient noise of a training that runs, from gradients it computes anyway."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

import torch
from torch import Tensor

from carpool.predictors.noise import NoiseScale

_TOGETHER = 4  # steps whose gradients are compared
_EVERY = 16  # steps from one comparison to the next: reading a gradient takes time, and on a GPU it waits for it


class NoiseMeter:
    """Takes a few steps in a row for the parts of one large batch, as if the weights had not moved in between.

    They do move, so that gradients are a little less alike than they would be, and φ comes out a little high. Nothing
    of the training is changed: gradients are only read.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._noise = NoiseScale()
        self._count = 0
        self._sizes: list[int] = []
        self._norms: list[float] = []
        self._sum: Tensor | None = None

    @property
    def scale(self) -> float | None:
        """φ in samples; None before the first comparison, and where the noise drowns the gradient."""
        found = self._noise.predict().mean
        return found if isfinite(found) else None

    @torch.no_grad()
    def see(self, num_samples: int) -> None:
        """A step of so many samples has left its gradient on the parameters."""
        place = self._count % _EVERY
        self._count += 1
        grads = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        if place >= _TOGETHER or not grads:
            return
        gradient = torch.cat([grad.flatten().float() for grad in grads])
        if place == 0 or self._sum is None or self._sum.shape != gradient.shape:
            self._sizes, self._norms, self._sum = [], [], torch.zeros_like(gradient)
        self._sizes.append(num_samples)
        self._norms.append(_squared(gradient))
        self._sum.add_(gradient, alpha=num_samples)
        if len(self._sizes) == _TOGETHER:
            self._noise.partial_fit(self._sizes, self._norms, _squared(self._sum / sum(self._sizes)))
            self._sum = None


def _squared(values: Tensor) -> float:
    return float(values.double().square().sum())
