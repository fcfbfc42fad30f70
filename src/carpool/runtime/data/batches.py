"""Batches: reads samples by index, augments them reproducibly and moves them to the device.

The ways, best first: rows that lie on the device are gathered there; rows that do not fit are gathered on the host into
pinned memory and copied while the device computes the step before; datasets that are read sample by sample are read
ahead by processes of their own. All of them give the batches of the plain way, bit for bit.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import default_collate

from carpool.core.errors import InputError
from carpool.runtime.compat.vmm import device_view
from carpool.runtime.data.datasets import TensorData
from carpool.runtime.data.prefetch import BatchRequest, ReaderPool, RowPrefetcher
from carpool.runtime.engine.determinism import derive, seed_augment, seed_batch, seed_sample, uniforms

FITS = 0.25  # of the device's free memory that data may take: models, activations and other jobs need the rest
GPU_READERS = 2  # processes that read for a GPU unless the training says how many


class InputMode(StrEnum):
    """How batches come about."""

    PLAIN = "plain"  # made by the process that computes, when they are needed
    ON_DEVICE = "on the device"
    AHEAD = "ahead"  # gathered and copied while the step before is computed
    READERS = "readers"


@dataclass(frozen=True, slots=True)
class InputPlan:
    """A way, and why."""

    way: InputMode
    words: str
    readers: int = 0


def plan_input(
    *, on_gpu: bool, row_bytes: int | None, free_bytes: int, is_map_style: bool, readers: int | None = None
) -> InputPlan:
    """The way for a dataset. ``row_bytes`` is the size of data that lies in tensors, ``None`` for other data."""
    if is_map_style:
        count = readers if readers is not None else GPU_READERS if on_gpu else 0
        if count:
            return InputPlan(InputMode.READERS, f"samples are read ahead by {count} processes of their own", count)
        return InputPlan(InputMode.PLAIN, "samples are read by the process that computes: workers = 0")
    if not on_gpu:
        return InputPlan(InputMode.PLAIN, "the data lies in the memory that computes")
    if row_bytes is None:
        return InputPlan(InputMode.PLAIN, "batches are made by the dataset itself and copied to the device")
    sizes = (
        f"the data takes {row_bytes / 2**20:.1f} MiB, a quarter of the free memory is {free_bytes * FITS / 2**20:.0f}"
    )
    if row_bytes <= free_bytes * FITS:
        return InputPlan(InputMode.ON_DEVICE, f"the data lies on the device: {sizes}")
    return InputPlan(InputMode.AHEAD, f"batches are copied to the device ahead of their step: {sizes}")


class GatherBuffer:
    """One place for batches of some length."""

    def __init__(self, tensors: Sequence[Tensor], count: int) -> None:
        device = tensors[0].device
        self._tensors = tensors
        self._chosen = torch.zeros(count, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._seen = self._chosen
        if device.type == "cuda":
            with contextlib.suppress(RuntimeError):  # where torch does not take it, it is copied
                self._seen = device_view(device, self._chosen)
        self._index = torch.zeros(count, dtype=torch.int64, device=device)
        self.batch = tuple(rows.new_empty((count, *rows.shape[1:])) for rows in tensors)

    def choose(self, samples: NDArray[np.int64]) -> None:
        """The samples that `gather` will fetch from now on; it must have fetched those chosen before."""
        self._chosen.numpy()[:] = samples

    def gather(self) -> None:
        """Fetch the chosen samples."""
        if self._seen.device == self._index.device:
            torch.add(self._seen, 0, out=self._index)  # by a kernel
        else:
            self._index.copy_(self._seen, non_blocking=True)
        for rows, place in zip(self._tensors, self.batch, strict=True):
            torch.index_select(rows, 0, self._index, out=place)


_CPU = torch.device("cpu")
_FEW = 16  # samples of the batch that is made twice


class AugmentRandom:
    """Random numbers for augmentation that follow from (seed, epoch, sample): the cut of the batch cannot matter.

    Each call gives new ones, a row for every sample of the batch.
    """

    def __init__(self, seed: int, epoch: int, samples: NDArray[np.int64], device: torch.device | None = None) -> None:
        self._key = derive("augment", seed, epoch)
        self._device = device or _CPU  # where the batch lies
        self._samples = samples
        self._drawn = 0

    def uniform(self, columns: int = 1) -> Tensor:
        """Numbers in [0, 1) of shape (samples, columns)."""
        drawn = range(self._drawn, self._drawn + columns)
        self._drawn = drawn.stop
        return torch.from_numpy(uniforms(self._key, self._samples, drawn)).to(self._device)

    def integers(self, low: int, high: int, columns: int = 1) -> Tensor:
        """Whole numbers in [low, high) of shape (samples, columns)."""
        return (self.uniform(columns) * (high - low)).long().clamp_(max=high - low - 1) + low


Augment = Callable[[Any, AugmentRandom], Any]


class HostBatchReader:
    """The plain way to a batch on the host: by the dataset's ``batch(indices)``, or else sample by sample."""

    def __init__(self, dataset: Any, seed: int, collate: Callable[[list[Any]], Any] | None) -> None:
        self.dataset = dataset
        self.is_map_style = not hasattr(dataset, "batch")
        self._seed = seed
        self._collate = collate or default_collate
        # Seeding takes some 20 µs: it is left out where nobody but our own datasets and torch's collate have a say.
        self.may_draw = collate is not None if self.is_map_style else _is_foreign(dataset)

    def read(self, epoch: int, samples: NDArray[np.int64]) -> Any:
        """The batch of these samples."""
        rows = [self._sample(epoch, int(sample)) for sample in samples] if self.is_map_style else []
        if self.may_draw:  # else what is drawn would follow from what ran here before
            seed_batch(self._seed, epoch, int(samples[0]))
        return self._collate(rows) if self.is_map_style else self.dataset.batch(torch.from_numpy(samples))

    def _sample(self, epoch: int, sample: int) -> Any:
        seed_sample(self._seed, epoch, sample)
        return self.dataset[sample]


class BatchSource:
    """A dataset read in batches. All ways (inputs.py) give the same; ``notes`` says which one was chosen, and why."""

    def __init__(
        self,
        dataset: Any,
        *,
        seed: int,
        augment: Augment | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        device: torch.device = _CPU,
        workers: int | None = None,
        choice: InputPlan | None = None,
    ) -> None:
        self._seed = seed
        self._augment = augment
        self._plain = HostBatchReader(dataset, seed, collate)
        self._rows: TensorData | None = dataset if type(dataset) is TensorData else None
        self._expected: deque[BatchRequest] = deque()
        self._request: BatchRequest | None = None  # rows under way
        self._ahead: RowPrefetcher | None = None
        self._readers: ReaderPool | None = None
        self.choice = choice or self._choose(device, workers)
        self.notes: tuple[str, ...] = ()
        self._settle(device)

    @property
    def depth(self) -> int:
        """How many batches it can use to know beforehand."""
        return self._readers.depth if self._readers is not None else int(self._ahead is not None)

    @property
    def is_rows(self) -> bool:
        """Whether batches are rows of tensors: no code of the user's, no file with a place in it, is asked for them."""
        return self._rows is not None

    def expect(self, requests: list[BatchRequest]) -> None:
        """Say which batches will probably be fetched from now on: a wrong guess costs time and changes nothing."""
        if self._readers is not None:
            self._readers.expect(requests)
        else:
            self._expected = deque(requests)

    def send(self) -> None:
        """While the device computes: send it what was gathered meanwhile."""
        if self._ahead is not None:
            self._ahead.send()

    def fetch(self, epoch: int, samples: NDArray[np.int64], device: torch.device) -> Any:
        """The batch of these samples, augmented, on the device."""
        if self._takes_rows:
            batch = self._finished(self._gather(epoch, samples, device), epoch, samples)
            return self._augmented(batch, epoch, samples, device)
        batch = self._plain.read(epoch, samples) if self._readers is None else self._readers.take(epoch, samples)
        return to_device(self._augmented(batch, epoch, samples, _CPU), device)

    def gathering(self, count: int) -> GatherBuffer | None:
        """How to fetch so many samples in a recording; `None` where more is done to them than taking rows."""
        if (
            self.choice.way is not InputMode.ON_DEVICE
            or self._rows is None
            or self._rows.finish
            or self._augment is not None
        ):
            return None
        return GatherBuffer(self._rows.tensors, count)

    def _gather(self, epoch: int, samples: NDArray[np.int64], device: torch.device) -> tuple[Tensor, ...]:
        assert self._rows is not None
        index = torch.from_numpy(samples)
        if self._ahead is None:  # the rows lie on the device
            index = index.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else index
            return tuple([rows.index_select(0, index) for rows in self._rows.tensors])
        if self._request is not None and self._request.matches(epoch, samples):
            found = self._ahead.take()
        else:
            found = tuple(rows.index_select(0, index).to(device) for rows in self._rows.tensors)
        self._gather_next(epoch, samples)
        return found

    def _gather_next(self, epoch: int, samples: NDArray[np.int64]) -> None:
        """Begin with the batch that is expected after this one."""
        self._request = None
        while self._expected and not self._expected.popleft().matches(epoch, samples):
            pass
        if self._expected and self._ahead is not None:
            self._request = self._expected[0]
            self._ahead.gather(torch.from_numpy(self._request.samples))

    def _finished(self, rows: tuple[Tensor, ...], epoch: int, samples: NDArray[np.int64]) -> Any:
        assert self._rows is not None
        if self._plain.may_draw:
            seed_batch(self._seed, epoch, int(samples[0]))
        return self._rows.finish(rows) if self._rows.finish else rows

    def _augmented(self, batch: Any, epoch: int, samples: NDArray[np.int64], device: torch.device) -> Any:
        if self._augment is None:
            return batch
        seed_augment(self._seed, epoch, int(samples[0]))
        batch = self._augment(batch, AugmentRandom(self._seed, epoch, samples, device))
        if batch is None:
            raise InputError("augment returned nothing", way_out="Return the batch.")
        return batch

    def _choose(self, device: torch.device, workers: int | None) -> InputPlan:
        on_gpu = device.type == "cuda"
        return plan_input(
            on_gpu=on_gpu,
            row_bytes=None if self._rows is None else sum(rows.nbytes for rows in self._rows.tensors),
            free_bytes=torch.cuda.mem_get_info(device)[0] if on_gpu else 0,
            is_map_style=self._plain.is_map_style,
            readers=workers,
        )

    def _settle(self, device: torch.device) -> None:
        """Prepare the chosen way; where finishing rows on the device gives other bits, fall back to the plain one."""
        host = self._rows
        if self.choice.way is InputMode.READERS:
            self._readers = ReaderPool(self._plain.read, self.choice.readers)
            weakref.finalize(self, self._readers.close)
        elif self.choice.way is InputMode.ON_DEVICE and host is not None:
            self._rows = host.to(device)
        elif self.choice.way is InputMode.AHEAD and host is not None:
            self._ahead = RowPrefetcher(host.tensors, device)
        if self.choice.way is not InputMode.PLAIN:
            self.notes = (self.choice.words,)
        self._takes_rows = host is not None and self.choice.way in {InputMode.ON_DEVICE, InputMode.AHEAD}
        if self.choice.way in {InputMode.ON_DEVICE, InputMode.AHEAD} and not self._agrees(device):
            self.choice = InputPlan(
                InputMode.PLAIN, "batches are made on the host: made on the device they have other bits"
            )
            self._rows, self._ahead, self._takes_rows, self.notes = host, None, False, (self.choice.words,)

    def _agrees(self, device: torch.device) -> bool:
        """Whether a first small batch, made the chosen way, is the plain one."""
        few = np.arange(min(_FEW, len(self._plain.dataset)), dtype=np.int64)
        if self._augment is None and (self._rows is None or self._rows.finish is None):
            return True
        try:
            made = self.fetch(0, few, device)
        except (RuntimeError, TypeError, ValueError):  # code that takes the batch to lie on the host
            return False
        plain = to_device(self._augmented(self._plain.read(0, few), 0, few, _CPU), device)
        return _equal(made, plain)


def _is_foreign(dataset: Any) -> bool:
    """Whether code of the user's makes its batches, in the dataset or in what finishes its rows."""
    own = "carpool.runtime.data.datasets"
    if not type(dataset).__module__.startswith(own):
        return True
    finish = getattr(dataset, "finish", None)
    return finish is not None and not str(getattr(finish, "__module__", "")).startswith(own)


def _equal(one: Any, other: Any) -> bool:
    """Whether two batches are the same, bit for bit."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    return bool(one == other)


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with every tensor in it on the device."""
    if isinstance(batch, Tensor):
        return batch if batch.device == device else _sent(batch, device)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*[to_device(value, device) for value in batch])
    if isinstance(batch, (list, tuple)):
        return type(batch)([to_device(value, device) for value in batch])
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    return batch.to(device) if hasattr(batch, "to") else batch


def _sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on the device; to a GPU through pinned memory, so that nobody waits for what the GPU does just now."""
    if device.type == "cuda" and not tensor.is_cuda:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
