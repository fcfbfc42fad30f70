"""Batches: reads samples by index, augments them reproducibly and moves them to the device.

Input modes, fastest first: rows in device memory are gathered there; rows that do not fit are gathered on the host into
pinned memory and copied while the device computes the step before; map-style datasets are read by reader processes. All
give the batches of the plain host mode, bit for bit.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Callable
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
from carpool.runtime.data.nested import map_leaves
from carpool.runtime.data.prefetch import BatchRequest, ReaderPool, RowPrefetcher
from carpool.runtime.data.sample_stream import SampleStream
from carpool.runtime.data.tensor_rows import DeviceRows, draws_nothing, makes_batches, same_batch, tensor_rows
from carpool.runtime.engine.determinism import derive, seed_augment, seed_batch, seed_sample, uniforms

DATA_FRACTION = 0.25  # of free device memory that data may use; models, activations and other jobs need the rest
GPU_READERS = 2  # default number of reader processes for a GPU

_CPU = torch.device("cpu")
_CHECKED_SAMPLES = 16  # of the batch that is made both ways


class InputMode(StrEnum):
    """Where and when batches are made."""

    HOST = "host"  # by the training process, when needed
    ON_DEVICE = "on device"
    PREFETCH = "prefetch"  # gathered and copied during the step before
    READERS = "readers"


@dataclass(frozen=True, slots=True)
class InputPlan:
    """An input mode, and the reason for it."""

    mode: InputMode
    reason: str
    readers: int = 0


_STREAMED = InputPlan(InputMode.HOST, "samples are read from a stream by the training process")


def plan_input(
    *, on_gpu: bool, row_bytes: int | None, free_bytes: int, is_map_style: bool, readers: int | None = None
) -> InputPlan:
    """Choose the input mode of a dataset; ``row_bytes`` is its size if it is held in tensors."""
    if is_map_style:
        count = readers if readers is not None else GPU_READERS if on_gpu else 0
        if count:
            return InputPlan(InputMode.READERS, f"samples are read ahead by {count} reader processes", count)
        return InputPlan(InputMode.HOST, "samples are read by the training process: workers = 0")
    if not on_gpu:
        return InputPlan(InputMode.HOST, "the data is in host memory")
    if row_bytes is None:
        return InputPlan(InputMode.HOST, "the dataset makes batches on the host")
    limit_mib = free_bytes * DATA_FRACTION / 2**20
    sizes = f"{row_bytes / 2**20:.1f} MiB of data, limit {limit_mib:.0f} MiB ({DATA_FRACTION:.0%} of free memory)"
    if row_bytes <= free_bytes * DATA_FRACTION:
        return InputPlan(InputMode.ON_DEVICE, f"the data is kept in device memory: {sizes}")
    return InputPlan(InputMode.PREFETCH, f"batches are prefetched to the device: {sizes}")


def _free_bytes(device: torch.device) -> int:
    """Memory that this process may still allocate on a GPU: free there, and within its own limit."""
    own: Any = device.index  # None for "cuda", which the stubs do not know
    index = torch.cuda.current_device() if own is None else own
    free, total = torch.cuda.mem_get_info(index)
    limit = int(total * torch.cuda.get_per_process_memory_fraction(index))
    return max(0, min(free, limit - torch.cuda.memory_reserved(index)))


class GatherBuffer:
    """A static batch that a captured graph gathers from rows in device memory."""

    def __init__(self, source: DeviceRows, count: int) -> None:
        tensors = source.rows.tensors
        device = tensors[0].device
        self._source = source
        self._tensors = tensors
        self._host_index = torch.zeros(count, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._mapped_index = self._host_index
        if device.type == "cuda":
            with contextlib.suppress(RuntimeError):  # without a mapping the index is copied
                self._mapped_index = device_view(device, self._host_index)
        self._index = torch.zeros(count, dtype=torch.int64, device=device)
        self._gathered = tuple(rows.new_empty((count, *rows.shape[1:])) for rows in tensors)
        self.batch = source.rows.pack(self._gathered)

    def set_samples(self, samples: NDArray[np.int64]) -> None:
        """Set the samples of the next `gather`; the last one must have finished."""
        self._source.refresh()
        self._host_index.numpy()[:] = samples

    def gather(self) -> None:
        if self._mapped_index.device == self._index.device:
            torch.add(self._mapped_index, 0, out=self._index)  # a kernel, not a copy
        else:
            self._index.copy_(self._mapped_index, non_blocking=True)
        for rows, target in zip(self._tensors, self._gathered, strict=True):
            torch.index_select(rows, 0, self._index, out=target)


class AugmentRandom:
    """Random numbers for augmentation that depend on (seed, epoch, sample) only, not on the split of the batch.

    Each call returns new ones, one row per sample of the batch.
    """

    def __init__(self, seed: int, epoch: int, samples: NDArray[np.int64], device: torch.device | None = None) -> None:
        self._key = derive("augment", seed, epoch)
        self._device = device or _CPU
        self._samples = samples
        self._columns_used = 0

    def uniform(self, columns: int = 1) -> Tensor:
        """Numbers in [0, 1) of shape (samples, columns)."""
        drawn = range(self._columns_used, self._columns_used + columns)
        self._columns_used = drawn.stop
        return torch.from_numpy(uniforms(self._key, self._samples, drawn)).to(self._device)

    def integers(self, low: int, high: int, columns: int = 1) -> Tensor:
        """Integers in [low, high) of shape (samples, columns)."""
        return (self.uniform(columns) * (high - low)).long().clamp_(max=high - low - 1) + low


Augment = Callable[[Any, AugmentRandom], Any]


class HostBatchReader:
    """Reads a batch on the host: rows by index, the dataset's ``batch(indices)``, or sample by sample with collate."""

    def __init__(
        self,
        dataset: Any,
        seed: int,
        collate: Callable[[list[Any]], Any] | None,
        stream: SampleStream | None = None,
    ) -> None:
        self.dataset = dataset
        self._stream = stream
        self.rows = tensor_rows(dataset, collate) if stream is None else None
        self.is_map_style = self.rows is None and not makes_batches(dataset)  # or a stream
        self._seed = seed
        self._collate = collate or default_collate
        # Seeding takes about 20 µs: skipped where no user code runs.
        self._samples_may_draw = not draws_nothing(dataset)
        if self.rows is not None:
            self.may_draw = self.rows.finish is not None and _is_user_code(self.rows.finish)
        else:
            self.may_draw = collate is not None if self.is_map_style else _is_user_code(type(dataset))

    def read(self, epoch: int, samples: NDArray[np.int64]) -> Any:
        rows: list[Any] = []
        if self._stream is not None:
            rows = self._stream.read(epoch, samples)
        elif self.is_map_style:
            rows = [self._sample(epoch, int(sample)) for sample in samples]
        if self.may_draw:
            seed_batch(self._seed, epoch, int(samples[0]))
        if self.is_map_style:
            return self._collate(rows)
        return (self.rows or self.dataset).batch(torch.from_numpy(samples))

    def _sample(self, epoch: int, sample: int) -> Any:
        if self._samples_may_draw:
            seed_sample(self._seed, epoch, sample)
        return self.dataset[sample]


class BatchSource:
    """Reads a dataset in batches, in the best input mode; ``notes`` says which and why."""

    def __init__(
        self,
        dataset: Any,
        *,
        seed: int,
        augment: Augment | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        device: torch.device = _CPU,
        workers: int | None = None,
        plan: InputPlan | None = None,
        stream: SampleStream | None = None,
    ) -> None:
        self._seed = seed
        self._augment = augment
        self._host_reader = HostBatchReader(dataset, seed, collate, stream)
        self._rows = self._host_reader.rows
        self._device_rows: DeviceRows | None = None
        self._expected: deque[BatchRequest] = deque()
        self._in_flight: BatchRequest | None = None  # of the prefetcher
        self._prefetcher: RowPrefetcher | None = None
        self._readers: ReaderPool | None = None
        self.plan = plan or (_STREAMED if stream is not None else self._choose(device, workers))
        self.notes: tuple[str, ...] = () if self.plan.mode is InputMode.HOST else (self.plan.reason,)
        self._uses_rows = self._rows is not None and self.plan.mode in {InputMode.ON_DEVICE, InputMode.PREFETCH}
        self._prepare(device)

    @property
    def prefetch_depth(self) -> int:
        return self._readers.depth if self._readers is not None else int(self._prefetcher is not None)

    def prefetch(self, requests: list[BatchRequest]) -> None:
        """Announce the next batches; a wrong guess only costs time."""
        if self._readers is not None:
            self._readers.prefetch(requests)
        else:
            self._expected = deque(requests)

    def start_copy(self) -> None:
        if self._prefetcher is not None:
            self._prefetcher.start_copy()

    def fetch(self, epoch: int, samples: NDArray[np.int64], device: torch.device) -> Any:
        if self._uses_rows:
            batch = self._finish(self._gather(epoch, samples, device), epoch, samples)
            return self._augmented(batch, epoch, samples, device)
        batch = self._host_reader.read(epoch, samples) if self._readers is None else self._readers.take(epoch, samples)
        return to_device(self._augmented(batch, epoch, samples, _CPU), device)

    def gather_buffer(self, count: int) -> GatherBuffer | None:
        """A buffer to gather `count` samples in a captured graph; None if batches are not plain rows on the device."""
        source = self._device_rows
        if source is None or source.rows.finish or self._augment is not None:
            return None
        return GatherBuffer(source, count)

    def _gather(self, epoch: int, samples: NDArray[np.int64], device: torch.device) -> tuple[Tensor, ...]:
        assert self._rows is not None
        index = torch.from_numpy(samples)
        if self._device_rows is not None:
            self._device_rows.refresh()
            index = index.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else index
            return self._device_rows.rows.gather(index)
        assert self._prefetcher is not None
        if self._in_flight is not None and self._in_flight.matches(epoch, samples):
            batch = self._prefetcher.take()
        else:
            batch = tuple(rows.to(device) for rows in self._rows.gather(index))
        self._prefetch_after(epoch, samples)
        return batch

    def _prefetch_after(self, epoch: int, samples: NDArray[np.int64]) -> None:
        self._in_flight = None
        while self._expected and not self._expected.popleft().matches(epoch, samples):
            pass
        if self._expected and self._prefetcher is not None and self._rows is not None:
            self._in_flight = self._expected[0]
            self._prefetcher.gather(self._rows.rows_of(torch.from_numpy(self._in_flight.samples)))

    def _finish(self, rows: tuple[Tensor, ...], epoch: int, samples: NDArray[np.int64]) -> Any:
        assert self._rows is not None
        if self._host_reader.may_draw:
            seed_batch(self._seed, epoch, int(samples[0]))
        return self._rows.finished(rows)

    def _augmented(self, batch: Any, epoch: int, samples: NDArray[np.int64], device: torch.device) -> Any:
        if self._augment is None:
            return batch
        seed_augment(self._seed, epoch, int(samples[0]))
        batch = self._augment(batch, AugmentRandom(self._seed, epoch, samples, device))
        if batch is None:
            raise InputError("augment returned None", way_out="Return the batch.")
        return batch

    def _choose(self, device: torch.device, workers: int | None) -> InputPlan:
        on_gpu = device.type == "cuda"
        return plan_input(
            on_gpu=on_gpu,
            row_bytes=None if self._rows is None else self._rows.num_bytes,
            free_bytes=_free_bytes(device) if on_gpu else 0,
            is_map_style=self._host_reader.is_map_style,
            readers=workers,
        )

    def _prepare(self, device: torch.device) -> None:
        rows, mode = self._rows, self.plan.mode
        if mode is InputMode.READERS:
            self._readers = ReaderPool(self._host_reader.read, self.plan.readers)
            weakref.finalize(self, self._readers.close)
        elif mode is InputMode.ON_DEVICE and rows is not None:
            self._device_rows = DeviceRows(rows, device)
        elif mode is InputMode.PREFETCH and rows is not None:
            self._prefetcher = RowPrefetcher(rows.tensors, device)
        if mode in {InputMode.ON_DEVICE, InputMode.PREFETCH} and not self._matches_host(device):
            self.plan = InputPlan(
                InputMode.HOST, "batches are made on the host: made on the device they differ in bits"
            )
            self._device_rows, self._prefetcher, self._uses_rows, self.notes = None, None, False, (self.plan.reason,)

    def _matches_host(self, device: torch.device) -> bool:
        if self._augment is None and (self._rows is None or self._rows.finish is None):
            return True
        samples = np.arange(min(_CHECKED_SAMPLES, len(self._host_reader.dataset)), dtype=np.int64)
        try:
            batch = self.fetch(0, samples, device)
        except (RuntimeError, TypeError, ValueError):  # user code that assumes a batch on the host
            return False
        host_batch = self._augmented(self._host_reader.read(0, samples), 0, samples, _CPU)
        return same_batch(batch, to_device(host_batch, device))


def _is_user_code(function: Any) -> bool:
    """Whether a class or function is not one of carpool's datasets."""
    return not str(getattr(function, "__module__", "")).startswith("carpool.runtime.data.datasets")


def to_device(batch: Any, device: torch.device) -> Any:
    """Move every tensor of a nested batch to the device, to a GPU through pinned memory without synchronizing."""

    def moved(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf.to(device) if hasattr(leaf, "to") else leaf
        if leaf.device == device:
            return leaf
        pinned = leaf.pin_memory() if device.type == "cuda" and not leaf.is_cuda else leaf
        return pinned.to(device, non_blocking=True)

    return map_leaves(batch, moved)
