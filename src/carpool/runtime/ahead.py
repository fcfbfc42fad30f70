"""Rows of the next batch on their way to the device while the present step is computed.

A thread gathers them into pinned memory (it makes no CUDA calls, so that it cannot disturb a graph being captured);
`send` starts the copy on a stream of its own; `take` lets the present stream wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor


class RowsAhead:
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
