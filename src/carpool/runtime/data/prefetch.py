"""Prefetch: reader processes for map-style datasets and asynchronous copies of rows to the device.

A thread gathers them into pinned memory (it makes no CUDA calls, so that it cannot disturb a graph being captured);
`send` starts the copy on a stream of its own; `take` lets the present stream wait for it.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import socket
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from carpool.runtime.process.child_process import ChildProcess, receive_frame, send_frame


class RowPrefetcher:
    """One batch of rows under way."""

    def __init__(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        self._tensors = tensors
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._on_gpu else None  # type: ignore[no-untyped-call]
        self._pool = ThreadPoolExecutor(1, "rows-ahead")
        self._gathering: Future[None] | None = None
        self._staged: list[Tensor] = []
        self._sent: list[Tensor] = []

    def gather(self, samples: Tensor) -> None:
        """Begin to gather these rows; what was under way is forgotten."""
        if self._gathering is not None:
            self._gathering.result()
        self._sent = []
        staged = self._staged = [
            torch.empty((len(samples), *rows.shape[1:]), dtype=rows.dtype, pin_memory=self._on_gpu)
            for rows in self._tensors
        ]
        self._gathering = self._pool.submit(self._fill, staged, samples)

    def _fill(self, staged: list[Tensor], samples: Tensor) -> None:
        for rows, there in zip(self._tensors, staged, strict=True):
            torch.index_select(rows, 0, samples, out=there)

    def send(self) -> None:
        """Start the copy to the device; returns at once if nothing is under way."""
        if self._gathering is None:
            return
        self._gathering.result()
        self._gathering = None
        if self._stream is None:
            self._sent = self._staged
            return
        with torch.cuda.stream(self._stream):
            self._sent = [rows.to(self._device, non_blocking=True) for rows in self._staged]

    def take(self) -> tuple[Tensor, ...]:
        """The rows, for the present stream."""
        self.send()
        if self._stream is not None:
            present = torch.cuda.current_stream(self._device)
            present.wait_stream(self._stream)
            for rows in self._sent:
                rows.record_stream(present)
        taken, self._sent, self._staged = tuple(self._sent), [], []
        return taken


# They are forked, so that the dataset need not be pickled, and each seeds the generators for every sample as the plain
# way does: whoever reads a batch, it is the same. One that fails or dies is not asked again; the batch is then read in
# the plain way, where an error of the dataset shows as it is.


Read = Callable[[int, NDArray[np.int64]], Any]  # (epoch, samples) -> batch


class BatchRequest(NamedTuple):
    """A batch that somebody will want."""

    epoch: int
    samples: NDArray[np.int64]

    def matches(self, epoch: int, samples: NDArray[np.int64]) -> bool:
        """Whether it is this one."""
        return self.epoch == epoch and np.array_equal(self.samples, samples)


class ReaderPool:
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
        self._process = ChildProcess("carpool-reader", partial(_serve, read))
        self._socket = self._process.socket

    def ask(self, request: BatchRequest) -> bool:
        try:
            send_frame(self._socket, pickle.dumps(tuple(request)))
        except OSError:
            self.close()
            return False
        return True

    def answer(self) -> tuple[Any] | None:
        """The batch in a tuple; ``None`` if it could not be read, and then this reader is gone."""
        raw = receive_frame(self._socket)
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
    while (raw := receive_frame(end)) is not None:
        epoch, samples = pickle.loads(raw)
        answer = _packed((read(epoch, samples),))
        with contextlib.suppress(BrokenPipeError):
            send_frame(end, answer)


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
