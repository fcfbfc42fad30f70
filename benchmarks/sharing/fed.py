"""Trainings that wait for their input, as entries: the device computes for a part of a step, and waits for the rest.

While it computes, such a job takes every multiprocessor it may have; with far fewer it would still be done before its
next batch is there.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from carpool.runtime.datasets.tensors import TensorData
from carpool.runtime.goals import Stop
from carpool.runtime.training import Training
from carpool.runtime.zoo import MODELS

MEMORY_BYTES = 5 << 30  # that the job of `gathered` declares
_GATHERED = 9216  # samples of 147 KiB: 1.29 GiB
_UNLIKE = 64  # pictures, repeated: noise costs the same to train on
_PAD = 4  # pixels around a picture, before it is cropped
_MEAN, _WIDTH = (
    np.array(each, dtype=np.float32)[:, None, None] for each in ((125.3, 123.0, 113.9), (63.0, 62.1, 66.7))
)


def augmented(
    batch_size: int = 128, steps: int = 100, model: str = "resnet50", readers: int = 2, samples: int = 8192
) -> Training:
    """A net for small pictures, each of which is cropped, flipped and scaled on the host by the processes that read."""
    net = MODELS[model](stem="imagenet") if model.startswith("resnet") else MODELS[model]()
    return Training(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=1e-4, momentum=0.9),
        dataset=Augmented(samples),
        loss=lambda net, batch: cross_entropy(net(batch[0]), batch[1]),
        batch_size=batch_size,
        stop=Stop(steps=steps),
        workers=readers,
    )


class Augmented:
    """Pictures of bytes, read one by one with the augmentation that is usual for CIFAR-10."""

    def __init__(self, samples: int) -> None:
        self._pictures = _noise(32, samples).numpy()

    def __len__(self) -> int:
        return len(self._pictures)

    def __getitem__(self, sample: int) -> tuple[NDArray[np.float32], int]:
        """One picture, and its class."""
        padded = np.pad(self._pictures[sample], ((0, 0), (_PAD, _PAD), (_PAD, _PAD)))
        down, right, mirror = (int(number) for number in torch.randint(2 * _PAD + 1, (3,)))
        picture = padded[:, down : down + 32, right : right + 32]
        picture = picture[:, :, ::-1] if mirror > _PAD else picture
        return (picture.astype(np.float32) - _MEAN) / _WIDTH, sample % 10


def gathered(
    batch_size: int = 256, steps: int = 100, image: int = 224, hidden: int = 256, samples: int = _GATHERED
) -> Training:
    """A perceptron over pictures of bytes that are more than a quarter of the job's memory (`MEMORY_BYTES`).

    So carpool leaves them on the host: a thread gathers each batch and sends it while the step before is computed.
    """
    net = MODELS["mlp"](image=image, hidden=hidden)
    return Training(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=1e-5),
        dataset=TensorData(_noise(image, samples), torch.arange(samples) % 10),
        loss=_loss_of_bytes,
        batch_size=batch_size,
        stop=Stop(steps=steps),
    )


def _loss_of_bytes(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    pictures, labels = batch
    return cross_entropy(net(pictures.float() / 128.0 - 1.0), labels)


def _noise(image: int, samples: int) -> Tensor:
    dice = torch.Generator().manual_seed(0)
    few = torch.randint(256, (_UNLIKE, 3, image, image), dtype=torch.uint8, generator=dice)
    return few.repeat(-(-samples // _UNLIKE), 1, 1, 1)[:samples]
