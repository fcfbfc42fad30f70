"""Processes that read a map-style dataset ahead, each a whole batch at a time.

They are forked, so that the dataset need not be pickled, and each seeds the generators for every sample as the plain
way does: whoever reads a batch, it is the same. One that fails or dies is not asked again; the batch is then read in
the plain way, where an error of the dataset shows as it is.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import socket
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from carpool.runtime.child import Child
from carpool.runtime.framing import receive, write

Read = Callable[[int, NDArray[np.int64]], Any]  # (epoch, samples) -> batch


class BatchRequest(NamedTuple):
    """A batch that somebody will want."""

    epoch: int
    samples: NDArray[np.int64]

    def matches(self, epoch: int, samples: NDArray[np.int64]) -> bool:
        """Whether it is this one."""
        return self.epoch == epoch and np.array_equal(self.samples, samples)


class Readers:
    """Reads batches ahead in the order in which they were asked for."""

    def __init__(self, read: Read, count: int) -> None:
        self._read = read
        self._idle = deque(_Reader(read) for _ in range(count))
        self._busy: deque[tuple[BatchRequest, _Reader]] = deque()
        self._waiting: deque[BatchRequest] = deque()  # for a reader

    @property
    def depth(self) -> int:
        """Batches that can be under way."""
        return len(self._idle) + len(self._busy)

    def expect(self, requests: list[BatchRequest]) -> None:
        """Read these ahead, in this order; those under way are not read twice."""
        under_way = [request for request, _ in self._busy]
        self._waiting = deque(each for each in requests if not any(each.matches(*other) for other in under_way))
        self._ask()

    def take(self, epoch: int, samples: NDArray[np.int64]) -> Any:
        """The batch; from whoever reads it, else read here. What was expected before it will not be wanted any more."""
        while self._busy:
            request, reader = self._busy.popleft()
            found = reader.answer()
            if found is None:
                continue
            self._idle.append(reader)
            self._ask()
            if request.matches(epoch, samples):
                return found[0]
        return self._read(epoch, samples)

    def _ask(self) -> None:
        while self._waiting and self._idle:
            request, reader = self._waiting.popleft(), self._idle.popleft()
            if reader.ask(request):
                self._busy.append((request, reader))

    def close(self) -> None:
        """End them."""
        for reader in (*self._idle, *(reader for _, reader in self._busy)):
            reader.close()
        self._idle.clear()
        self._busy.clear()


class _Reader:
    """One of them, as whoever asks sees it."""

    def __init__(self, read: Read) -> None:
        self._process = Child("carpool-reader", partial(_serve, read))
        self._socket = self._process.socket

    def ask(self, request: BatchRequest) -> bool:
        try:
            write(self._socket, pickle.dumps(tuple(request)))
        except OSError:
            self.close()
            return False
        return True

    def answer(self) -> tuple[Any] | None:
        """The batch in a tuple; ``None`` if it could not be read, and then this reader is gone."""
        raw = receive(self._socket)
        if raw is None:
            self.close()
            return None
        found: tuple[Any] = pickle.loads(raw)
        return found

    def close(self) -> None:
        self._process.close()


def _serve(read: Read, end: socket.socket) -> None:
    """In the child: read what is asked for until nobody asks any more or reading fails."""
    torch.set_num_threads(1)  # those of the parent are not here
    while (raw := receive(end)) is not None:
        epoch, samples = pickle.loads(raw)
        answer = _packed((read(epoch, samples),))
        with contextlib.suppress(BrokenPipeError):
            write(end, answer)


class _Pickler(pickle.Pickler):
    """Writes tensors as arrays: torch's own way makes a file of each."""

    def reducer_override(self, thing: Any) -> Any:
        if type(thing) is Tensor and thing.layout is torch.strided and not thing.requires_grad and not thing.is_cuda:
            dense = thing.detach().contiguous()
            return _tensor, (dense.view(-1).view(torch.uint8).numpy(), thing.dtype, tuple(thing.shape))
        return NotImplemented


def _tensor(raw: NDArray[np.uint8], dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(raw).view(dtype).view(shape)


def _packed(value: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file, protocol=5).dump(value)
    return file.getvalue()
