"""Tensor rows: recognizes datasets that only hold tensors, so that a batch is gathered by index in one call.

Recognized are carpool's `TensorData` and torch's `TensorDataset`; `Subset` (also from `random_split`), `ConcatDataset`
and `StackDataset` of recognized ones; tensors, arrays and lists of samples; Hugging Face datasets with the format torch
or numpy. A subclass is not, because it may override ``__getitem__``. They draw no random numbers. Batches have
the bits, types and strides that collating samples one by one gives; `_matches_samples` compares a few.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset, default_collate

from carpool.runtime.compat.torch_api import versions
from carpool.runtime.data.datasets import Finish, TensorData
from carpool.runtime.data.nested import map_leaves, nested_tensors
from carpool.runtime.engine.flat_buffers import differ

COPY_FRACTION = 0.25  # of free host memory that a copy of the samples may use
_CHECKED_SAMPLES = 16
_NUMBERS = (bool, int, float)


@dataclass(frozen=True, slots=True, eq=False)
class TensorRows:
    """Samples as rows of tensors, and the form of a batch."""

    tensors: tuple[Tensor, ...]
    form: Any = None  # a collated batch whose leaves are positions in `tensors`; None: a tuple of all
    index: Tensor | None = None  # the row of each sample; None: sample i is row i
    finish: Finish | None = None  # of `TensorData`

    def __len__(self) -> int:
        return len(self.tensors[0] if self.index is None else self.index)

    @property
    def num_bytes(self) -> int:
        return sum(rows.nbytes // max(len(rows), 1) * len(self) for rows in self.tensors)

    def rows_of(self, samples: Tensor) -> Tensor:
        return samples if self.index is None else self.index.index_select(0, samples)

    def gather(self, samples: Tensor) -> tuple[Tensor, ...]:
        index = self.rows_of(samples)
        return tuple([rows.index_select(0, index.to(rows.device)) for rows in self.tensors])

    def pack(self, rows: tuple[Tensor, ...]) -> Any:
        """A batch of gathered rows, in the form that collate gives it."""
        return rows if self.form is None else map_leaves(self.form, rows.__getitem__)

    def finished(self, rows: tuple[Tensor, ...]) -> Any:
        """A batch of gathered rows; what `finish` makes of part of a `TensorData` is collated, to a list."""
        if self.finish is None:
            return self.pack(rows)
        batch = self.finish(rows)
        return batch if self.form is None else list(batch)

    def batch(self, samples: Tensor) -> Any:
        return self.finished(self.gather(samples))

    def to(self, device: torch.device) -> TensorRows:
        """Copy the rows of these samples, and no others, to a device."""
        chosen = self.tensors if self.index is None else tuple(rows[self.index] for rows in self.tensors)
        return replace(self, tensors=tuple(rows.to(device) for rows in chosen), index=None)


class DeviceRows:
    """A copy of rows on a device that follows in-place changes of the originals."""

    def __init__(self, source: TensorRows, device: torch.device) -> None:
        self._source = source
        self._versions = versions(source.tensors)
        self.rows = source.to(device)

    def refresh(self) -> None:
        """Copy the rows again, to the same addresses, if a tensor was changed since."""
        if (now := versions(self._source.tensors)) == self._versions:
            return
        self._versions = now
        index = self._source.index
        for target, rows in zip(self.rows.tensors, self._source.tensors, strict=True):
            target.copy_(rows if index is None else rows[index])


def tensor_rows(dataset: Any, collate: Callable[[list[Any]], Any] | None) -> TensorRows | None:
    """The rows of a dataset; None if it must be read sample by sample."""
    if type(dataset) is TensorData:
        return TensorRows(dataset.tensors, finish=dataset.finish)
    if collate is not None:
        return None
    try:
        rows = _recognize(dataset)
        return rows if rows is not None and len(rows) and _matches_samples(rows, dataset) else None
    except (TypeError, ValueError, RuntimeError, IndexError, KeyError):  # read it as torch's DataLoader does
        return None


def makes_batches(dataset: Any) -> bool:
    """Whether a dataset has carpool's method ``batch(indices)``; that of a Hugging Face dataset takes a batch size."""
    return hasattr(dataset, "batch") and not _is_hugging_face(dataset)


def draws_nothing(dataset: Any) -> bool:
    """Whether reading a sample runs no code of the user, which might draw random numbers."""
    if type(dataset) is Subset:
        return draws_nothing(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return all(draws_nothing(part) for part in dataset.datasets)
    if type(dataset) is StackDataset:
        parts = dataset.datasets
        return all(draws_nothing(part) for part in (parts.values() if isinstance(parts, dict) else parts))
    return type(dataset) in {TensorDataset, Tensor, np.ndarray, range, list, tuple}


def _recognize(dataset: Any) -> TensorRows | None:
    if type(dataset) is TensorData:
        rows = _of_tensors(dataset.tensors, list(range(len(dataset.tensors))))
        return None if rows is None else replace(rows, finish=dataset.finish)
    if type(dataset) is TensorDataset:
        return _of_tensors(dataset.tensors, list(range(len(dataset.tensors))))
    if type(dataset) is range:
        return _of_tensors([torch.tensor(dataset)], 0)
    if type(dataset) in {Tensor, np.ndarray}:
        return _of_tensors([torch.as_tensor(dataset)], 0)
    if type(dataset) is Subset:
        return _subset(_recognize(dataset.dataset), dataset.indices)
    if type(dataset) is ConcatDataset:
        return _concat([_recognize(part) for part in dataset.datasets])
    if type(dataset) is StackDataset:
        return _stack(dataset.datasets)
    if type(dataset) in {list, tuple} and dataset:
        return _of_samples(dataset)
    return _of_hugging_face(dataset)


def _of_tensors(tensors: Sequence[Tensor], form: Any) -> TensorRows | None:
    if not all(type(t) is Tensor and t.layout is torch.strided and not t.requires_grad and t.ndim for t in tensors):
        return None
    return TensorRows(tuple(tensors), form) if len({len(tensor) for tensor in tensors}) == 1 else None


def _subset(rows: TensorRows | None, indices: Sequence[int]) -> TensorRows | None:
    if rows is None:
        return None
    chosen = torch.from_numpy(np.asarray(indices, dtype=np.int64).reshape(-1))
    chosen = torch.where(chosen < 0, chosen + len(rows), chosen)  # as the dataset's __getitem__ does
    return replace(rows, index=rows.rows_of(chosen))


def _concat(parts: Sequence[TensorRows | None]) -> TensorRows | None:
    found = [part for part in parts if part is not None]
    if not found or len(found) < len(parts) or any(_format(part) != _format(found[0]) for part in found):
        return None
    if not _has_room(sum(part.num_bytes for part in found)):
        return None
    held = [part if part.index is None else part.to(part.tensors[0].device) for part in found]
    return replace(
        found[0], tensors=tuple(map(torch.cat, zip(*[part.tensors for part in held], strict=True))), index=None
    )


def _format(rows: TensorRows) -> tuple[Any, ...]:
    return repr(rows.form), rows.finish, [(each.dtype, each.shape[1:], each.device) for each in rows.tensors]


def _stack(datasets: Any) -> TensorRows | None:
    parts = [_recognize(part) for part in (datasets.values() if isinstance(datasets, dict) else datasets)]
    found = [part for part in parts if part is not None and part.index is None and part.finish is None]
    if not found or len(found) < len(parts):
        return None
    tensors: list[Tensor] = []
    forms = []
    for part in found:
        forms.append(map_leaves(part.form, partial(operator.add, len(tensors))))
        tensors += part.tensors
    return _of_tensors(tensors, dict(zip(datasets, forms, strict=True)) if isinstance(datasets, dict) else forms)


def _of_samples(samples: Sequence[Any]) -> TensorRows | None:
    """Collate a list of samples of one form once; numbers become tensors, as in a batch."""
    form = _sample_form(samples[0])
    if form is None or any(_sample_form(sample) != form for sample in samples):
        return None
    sample_bytes = sum(leaf.nbytes for leaf in nested_tensors(map_leaves(samples[0], torch.as_tensor)))
    if not _has_room(len(samples) * sample_bytes):
        return None
    tensors: list[Tensor] = []

    def position(leaf: Tensor) -> int:
        tensors.append(leaf)
        return len(tensors) - 1

    form = map_leaves(default_collate(list(samples)), position)
    return _of_tensors(tensors, form)


def _sample_form(sample: Any) -> Any:
    """The common form of samples whose batches differ in values only; None if not all are tensors and numbers."""
    if type(sample) is Tensor:
        plain = sample.layout is torch.strided and not sample.requires_grad
        return (Tensor, sample.dtype, sample.shape, sample.device) if plain else None
    if isinstance(sample, np.ndarray | np.generic):
        return (type(sample), sample.dtype, sample.shape) if sample.dtype.kind in "biuf" else None
    if type(sample) in _NUMBERS:
        return type(sample)
    if type(sample) is dict:
        parts = [(key, _sample_form(value)) for key, value in sample.items()]
    elif type(sample) in {list, tuple} or (isinstance(sample, tuple) and hasattr(sample, "_fields")):
        parts = [(None, _sample_form(value)) for value in sample]
    else:
        return None
    return (type(sample), *parts) if parts and all(form is not None for _, form in parts) else None


def _of_hugging_face(dataset: Any) -> TensorRows | None:
    """A ``datasets.Dataset`` with the format torch or numpy; the library is not imported here."""
    if not _is_hugging_face(dataset) or not hasattr(dataset, "__getitem__"):
        return None
    if dataset.format["type"] not in {"torch", "numpy"} or not _has_room(int(dataset.data.nbytes)):
        return None
    columns = dataset[:]
    if not isinstance(columns, Mapping) or not all(isinstance(each, Tensor | np.ndarray) for each in columns.values()):
        return None
    return _of_tensors(
        list(map(torch.as_tensor, columns.values())), dict(zip(columns, range(len(columns)), strict=True))
    )


def _is_hugging_face(dataset: Any) -> bool:
    kind = type(dataset)
    return f"{kind.__module__}.{kind.__name__}" in {
        "datasets.arrow_dataset.Dataset",
        "datasets.iterable_dataset.IterableDataset",
    }


def _has_room(num_bytes: int) -> bool:
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return num_bytes <= COPY_FRACTION * free


def _matches_samples(rows: TensorRows, dataset: Any) -> bool:
    """Compare a few samples, gathered and collated one by one."""
    if len(rows) != len(dataset):
        return False
    samples = np.unique(np.linspace(0, len(rows) - 1, _CHECKED_SAMPLES).astype(np.int64))
    gathered = rows.batch(torch.from_numpy(samples))
    collated = default_collate([dataset[int(each)] for each in samples])
    strides = [[each.stride() for each in nested_tensors(batch)] for batch in (gathered, collated)]
    return same_batch(gathered, collated) and strides[0] == strides[1]


def same_batch(one: Any, other: Any) -> bool:
    """Whether two batches are equal in types, shapes and bits."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        same_format = (one.dtype, one.shape) == (other.dtype, other.shape)
        return same_format and not bool(differ(one, other).any())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same_batch, one, other))
    if isinstance(one, Mapping):
        return list(one) == list(other) and all(same_batch(one[key], other[key]) for key in one)
    return bool(one == other)
