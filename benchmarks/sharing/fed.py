"""Entry of a training that waits for its input: images come from a store with a fixed rate.

The device computes for a part of each step and waits for the rest; with far fewer multiprocessors it would still finish
before the next batch. The store is a clock, independent of other load on the host.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from zoo import MODELS
from zoo_trainings import OPTIMIZERS, RECIPES

from carpool.runtime.engine.stop_criteria import Stop
from carpool.runtime.engine.training import Training

_READERS = 2  # processes that read ahead
_UNLIKE = 64  # pictures, repeated: noise costs the same to train on
_SHORTEST_S = 0.001  # that it is worth to wait
_LATE_S = 0.02  # that a reader may make up for when it was held up


def delivered(model: str, batch_size: int = 512, steps: int = 100, per_s: float = 1e9, **sizes: str) -> Training:
    """A net of the zoo on pictures of CIFAR-10's shape, of which so many come in a second."""
    net = MODELS[model](**sizes)
    recipe = RECIPES[model]
    return Training(
        model=net,
        optimizer=OPTIMIZERS[recipe.optimizer](net.parameters(), lr=recipe.lr * 1e-3),
        dataset=Store(16 * batch_size, per_s / _READERS),
        loss=_loss,
        batch_size=batch_size,
        stop=Stop(steps=steps),
        workers=_READERS,
    )


class Store:
    """Pictures as bytes, one after the other; each reader has its own, and gets so many a second from it."""

    def __init__(self, samples: int, per_s: float) -> None:
        dice = torch.Generator().manual_seed(0)
        few = torch.randint(256, (_UNLIKE, 3, 32, 32), dtype=torch.uint8, generator=dice)
        self._pictures = few.repeat(-(-samples // _UNLIKE), 1, 1, 1)[:samples]
        self._every_s = 1.0 / per_s
        self._due = 0.0  # when the next picture is there

    def __len__(self) -> int:
        return len(self._pictures)

    def __getitem__(self, sample: int) -> tuple[Tensor, int]:
        """One picture, and its class."""
        now = time.monotonic()
        self._due = max(self._due + self._every_s, now - _LATE_S)
        if self._due > now + _SHORTEST_S:
            time.sleep(self._due - now)
        return self._pictures[sample], sample % 10


def _loss(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    pictures, labels = batch
    return cross_entropy(net(pictures.float() / 128.0 - 1.0), labels)
