"""From sample numbers to a batch on a device, augmented the same way whoever fetches it."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import default_collate

from carpool.core.errors import InputError
from carpool.runtime.ahead import RowsAhead
from carpool.runtime.chance import derive, uniforms
from carpool.runtime.datasets.tensors import TensorData
from carpool.runtime.gathering import Gathering
from carpool.runtime.inputs import Choice, Way, choose
from carpool.runtime.readers import BatchRequest, Readers
from carpool.runtime.seeding import seed_augment, seed_batch, seed_sample

_CPU = torch.device("cpu")
_FEW = 16  # samples of the batch that is made twice


class Chance:
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


Augment = Callable[[Any, Chance], Any]


class Plain:
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


class Samples:
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
        choice: Choice | None = None,
    ) -> None:
        self._seed = seed
        self._augment = augment
        self._plain = Plain(dataset, seed, collate)
        self._rows: TensorData | None = dataset if type(dataset) is TensorData else None
        self._expected: deque[BatchRequest] = deque()
        self._request: BatchRequest | None = None  # rows under way
        self._ahead: RowsAhead | None = None
        self._readers: Readers | None = None
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

    def gathering(self, count: int) -> Gathering | None:
        """How to fetch so many samples in a recording; `None` where more is done to them than taking rows."""
        if self.choice.way is not Way.ON_DEVICE or self._rows is None or self._rows.finish or self._augment is not None:
            return None
        return Gathering(self._rows.tensors, count)

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
        batch = self._augment(batch, Chance(self._seed, epoch, samples, device))
        if batch is None:
            raise InputError("augment returned nothing", way_out="Return the batch.")
        return batch

    def _choose(self, device: torch.device, workers: int | None) -> Choice:
        on_gpu = device.type == "cuda"
        return choose(
            on_gpu=on_gpu,
            row_bytes=None if self._rows is None else sum(rows.nbytes for rows in self._rows.tensors),
            free_bytes=torch.cuda.mem_get_info(device)[0] if on_gpu else 0,
            is_map_style=self._plain.is_map_style,
            readers=workers,
        )

    def _settle(self, device: torch.device) -> None:
        """Prepare the chosen way; where finishing rows on the device gives other bits, fall back to the plain one."""
        host = self._rows
        if self.choice.way is Way.READERS:
            self._readers = Readers(self._plain.read, self.choice.readers)
            weakref.finalize(self, self._readers.close)
        elif self.choice.way is Way.ON_DEVICE and host is not None:
            self._rows = host.to(device)
        elif self.choice.way is Way.AHEAD and host is not None:
            self._ahead = RowsAhead(host.tensors, device)
        if self.choice.way is not Way.PLAIN:
            self.notes = (self.choice.words,)
        self._takes_rows = host is not None and self.choice.way in {Way.ON_DEVICE, Way.AHEAD}
        if self.choice.way in {Way.ON_DEVICE, Way.AHEAD} and not self._agrees(device):
            self.choice = Choice(Way.PLAIN, "batches are made on the host: made on the device they have other bits")
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
    own = "carpool.runtime.datasets"
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
