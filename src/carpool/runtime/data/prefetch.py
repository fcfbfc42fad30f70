"""Prefetch: reader processes for map-style datasets and asynchronous copies of rows to the device."""

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

Read = Callable[[int, NDArray[np.int64]], Any]  # (epoch, samples) -> batch


class RowPrefetcher:
    """Prefetches one batch of rows.

    A thread gathers the rows into pinned memory; it makes no CUDA calls, which could disturb a graph capture.
    `start_copy` copies them on a side stream, and `take` makes the current stream wait for the copy.
    """

    def __init__(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        self._tensors = tensors
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._on_gpu else None  # type: ignore[no-untyped-call]
        self._thread = ThreadPoolExecutor(1, "row-prefetch")
        self._gathering: Future[None] | None = None
        self._pinned: list[Tensor] = []
        self._copied: list[Tensor] = []

    def gather(self, samples: Tensor) -> None:
        """Start gathering these rows; a batch in progress is dropped."""
        if self._gathering is not None:
            self._gathering.result()
        self._copied = []
        pinned = self._pinned = [
            torch.empty((len(samples), *rows.shape[1:]), dtype=rows.dtype, pin_memory=self._on_gpu)
            for rows in self._tensors
        ]
        self._gathering = self._thread.submit(self._fill, pinned, samples)

    def _fill(self, pinned: list[Tensor], samples: Tensor) -> None:
        for rows, target in zip(self._tensors, pinned, strict=True):
            torch.index_select(rows, 0, samples, out=target)

    def start_copy(self) -> None:
        if self._gathering is None:
            return
        self._gathering.result()
        self._gathering = None
        if self._stream is None:
            self._copied = self._pinned
            return
        with torch.cuda.stream(self._stream):
            self._copied = [rows.to(self._device, non_blocking=True) for rows in self._pinned]

    def take(self) -> tuple[Tensor, ...]:
        """The rows, ready for the current stream."""
        self.start_copy()
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._stream)
            for rows in self._copied:
                rows.record_stream(current)
        taken, self._copied, self._pinned = tuple(self._copied), [], []
        return taken


class BatchRequest(NamedTuple):
    """A batch to be read."""

    epoch: int
    samples: NDArray[np.int64]

    def matches(self, epoch: int, samples: NDArray[np.int64]) -> bool:
        return self.epoch == epoch and np.array_equal(self.samples, samples)


class ReaderPool:
    """Reads batches ahead, in order, in forked processes, so that the dataset need not be pickled.

    A reader that fails is dropped and its batch read in this process, where the dataset's error shows as usual.
    """

    def __init__(self, read: Read, count: int) -> None:
        self._read = read
        self._idle = deque(_Reader(read) for _ in range(count))
        self._busy: deque[tuple[BatchRequest, _Reader]] = deque()
        self._waiting: deque[BatchRequest] = deque()  # for an idle reader

    @property
    def depth(self) -> int:
        return len(self._idle) + len(self._busy)

    def prefetch(self, requests: list[BatchRequest]) -> None:
        """Read these batches ahead, in this order, except those in progress."""
        in_progress = [request for request, _ in self._busy]
        self._waiting = deque(each for each in requests if not any(each.matches(*other) for other in in_progress))
        self._dispatch()

    def take(self, epoch: int, samples: NDArray[np.int64]) -> Any:
        """The batch, from its reader or else read here; batches requested before it are dropped."""
        while self._busy:
            request, reader = self._busy.popleft()
            result = reader.receive()
            if result is None:
                continue
            self._idle.append(reader)
            self._dispatch()
            if request.matches(epoch, samples):
                return result[0]
        return self._read(epoch, samples)

    def _dispatch(self) -> None:
        while self._waiting and self._idle:
            request, reader = self._waiting.popleft(), self._idle.popleft()
            if reader.send(request):
                self._busy.append((request, reader))

    def close(self) -> None:
        for reader in (*self._idle, *(reader for _, reader in self._busy)):
            reader.close()
        self._idle.clear()
        self._busy.clear()


class _Reader:
    """The parent's side of one reader process."""

    def __init__(self, read: Read) -> None:
        self._process = ChildProcess("carpool-reader", partial(_serve, read))

    def send(self, request: BatchRequest) -> bool:
        try:
            send_frame(self._process.socket, pickle.dumps(tuple(request)))
        except OSError:
            self.close()
            return False
        return True

    def receive(self) -> tuple[Any] | None:
        """The batch in a tuple; ``None`` if reading failed, and then this reader is closed."""
        raw = receive_frame(self._process.socket)
        if raw is None:
            self.close()
            return None
        result: tuple[Any] = pickle.loads(raw)
        return result

    def close(self) -> None:
        self._process.close()


def _serve(read: Read, end: socket.socket) -> None:
    """In the child process: answer requests until the socket closes or reading fails."""
    torch.set_num_threads(1)  # the parent's thread pool does not survive the fork
    while (raw := receive_frame(end)) is not None:
        epoch, samples = pickle.loads(raw)
        file = io.BytesIO()
        _Pickler(file, protocol=5).dump((read(epoch, samples),))
        with contextlib.suppress(BrokenPipeError):
            send_frame(end, file.getvalue())


class _Pickler(pickle.Pickler):
    """Pickles tensors as arrays: torch's own reducer creates a file for each."""

    def reducer_override(self, thing: Any) -> Any:
        if type(thing) is Tensor and thing.layout is torch.strided and not thing.requires_grad and not thing.is_cuda:
            dense = thing.detach().contiguous()
            return _tensor, (dense.view(-1).view(torch.uint8).numpy(), thing.dtype, tuple(thing.shape))
        return NotImplemented


def _tensor(raw: NDArray[np.uint8], dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(raw).view(dtype).view(shape)
