"""Data in memory: a few tensors whose first dimension counts the samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from carpool.core.errors import InputError

Finish = Callable[[tuple[Tensor, ...]], Any]


class TensorData:
    """Samples as rows of tensors, read a batch at a time.

    ``finish`` makes a batch of rows ready for the model, for example bytes into floats: images stay small in memory.
    """

    def __init__(self, *tensors: Tensor, finish: Finish | None = None) -> None:
        sizes = [len(tensor) for tensor in tensors]
        if not sizes or len(set(sizes)) > 1:
            raise InputError(f"the tensors of a dataset hold {sizes} samples; they must be equally many")
        self.tensors = tensors
        self.finish = finish

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, sample: int) -> Any:
        rows = tuple(tensor[sample : sample + 1] for tensor in self.tensors)
        if sample < 0 or not len(rows[0]):
            raise IndexError(f"sample {sample}; the data holds {len(self)}")
        batch = self.finish(rows) if self.finish else rows
        return type(batch)([row[0] for row in batch])

    def batch(self, samples: Tensor) -> Any:
        """The samples with these numbers, as one batch."""
        rows = tuple(tensor.index_select(0, samples.to(tensor.device)) for tensor in self.tensors)
        return self.finish(rows) if self.finish else rows

    def batches(self, size: int) -> Iterator[Any]:
        """All samples in order, as batches."""
        for start in range(0, len(self), size):
            yield self.batch(torch.arange(start, min(start + size, len(self))))

    def to(self, device: str | torch.device) -> TensorData:
        """The same data on a device."""
        return TensorData(*[tensor.to(device) for tensor in self.tensors], finish=self.finish)

    def first(self, count: int) -> TensorData:
        """Only the first samples."""
        return TensorData(*[tensor[:count] for tensor in self.tensors], finish=self.finish)


@dataclass(frozen=True, slots=True)
class Split:
    """Data to train on, and data to judge by."""

    train: TensorData
    test: TensorData


def accuracy(model: nn.Module, data: TensorData, batch_size: int = 1024) -> float:
    """The share of samples whose largest output is at their label."""
    device = next(model.parameters()).device
    right = 0
    for inputs, labels in data.batches(batch_size):
        right += int((model(inputs.to(device)).argmax(-1) == labels.to(device)).sum())
    return right / len(data)


def scaled_images(mean: tuple[float, ...], std: tuple[float, ...]) -> Finish:
    """Bytes to floats in [0, 1], then less the mean and over the standard deviation of each channel."""
    shift, width = (torch.tensor(values).view(1, -1, 1, 1) for values in (mean, std))

    def finish(rows: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        images, *rest = rows
        floats = images.float().div_(255.0)
        return (floats.sub_(shift.to(floats.device)).div_(width.to(floats.device)), *rest)

    return finish
