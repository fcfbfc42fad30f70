"""CUDA graph capture and replay; a graph with branches is split at its first fork (compat/graph_split.py)."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from carpool.runtime.compat.graph_split import is_branched, split_at_fork
from carpool.runtime.compat.torch_api import end_allocation_to_pool
from carpool.runtime.compat.vmm import ScratchPool


def no_op() -> None:
    """Do nothing."""


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """A captured graph to replay; it holds raw addresses, so the caller must keep all its tensors alive."""

    head: Callable[[], None]  # linear: may be queued while another process uses the device
    tail: Callable[[], None] = no_op  # from the first fork on: must not be queued then

    def __call__(self) -> None:
        self.head()
        self.tail()


class GraphCapture(Protocol):
    """Captures graphs, and copies a loss to the host beside their replay."""

    has_branches: bool  # some graph captured so far was not linear

    def side_stream(self) -> contextlib.AbstractContextManager[None]:
        """Run on the capture stream, so that libraries initialize themselves for it."""

    def capture(self, work: Callable[[], None], *, starts_step: bool = False) -> CapturedGraph:
        """Capture `work` without running it; an error invalidates earlier graphs.

        ``starts_step``: split the graph at its first fork, so that its head can be queued early.
        """

    def reset(self) -> None:
        """Start a new memory pool after all graphs were dropped."""

    def copy_to_host(self, value: Tensor, target: Tensor) -> None:
        """Start copying a number to the host; later kernels do not wait for it."""

    def wait_for_copy(self) -> None: ...


class CudaGraphCapture:
    """Captures on a side stream, with one memory pool for all graphs of a job."""

    def __init__(self, device: torch.device, scratch: ScratchPool | None = None) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._scratch = scratch  # a pool that outlives its graphs
        self._pool = self._new_pool()
        self._copy_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._computed = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.has_branches = False
        # When the last graph of a pool is dropped, torch forgets the pool and rejects it from then on.
        self._anchor = None if scratch is None else self.capture(lambda: torch.zeros(1, device=device))

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            current.wait_stream(self._stream)

    def capture(self, work: Callable[[], object], *, starts_step: bool = False) -> CapturedGraph:
        """Capture `work`; other threads may use the device meanwhile."""
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # memory of eager passes is outside the pool
        with self.side_stream(), _no_garbage_collection():
            try:
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                work()
                graph.capture_end()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # the first error is the informative one
                    graph.capture_end()
                self._recover()
                raise
        has_branches = is_branched(graph.raw_cuda_graph())
        self.has_branches |= has_branches
        tail = split_at_fork(graph.raw_cuda_graph()) if starts_step and has_branches else None
        graph.instantiate()
        if tail is not None:
            return CapturedGraph(graph.replay, lambda: tail.launch(torch.cuda.current_stream(self._device).cuda_stream))
        return CapturedGraph(no_op, graph.replay) if has_branches else CapturedGraph(graph.replay)

    def reset(self) -> None:
        self._pool = self._new_pool()

    def _new_pool(self) -> Any:
        return torch.cuda.graph_pool_handle() if self._scratch is None else self._scratch.id

    def copy_to_host(self, value: Tensor, target: Tensor) -> None:
        """Copy a number to pinned memory on its own stream: the replay must not wait for the copy engine."""
        self._computed.record(torch.cuda.current_stream(self._device))
        self._copy_stream.wait_event(self._computed)
        with torch.cuda.stream(self._copy_stream):
            target.copy_(value, non_blocking=True)
        self._copied.record(self._copy_stream)

    def wait_for_copy(self) -> None:
        self._copied.synchronize()

    def _recover(self) -> None:
        """Clean up what torch leaves after a failed capture.

        Its allocator still allocates from the pool, and the generator is still in capture mode. The generator gets a
        new state; graphs captured before draw from the old one and must not be replayed.
        """
        index = self._device.index or 0
        end_allocation_to_pool(index, self._pool)
        self.reset()
        generator = torch.cuda.default_generators[index]
        generator.graphsafe_set_state(torch.Generator(self._device).graphsafe_get_state())


def capture_failure(error: BaseException) -> str:
    """The first line of an error during capture, for the job's story."""
    line = str(error).strip().partition("\n")[0]
    return f"capture failed: {type(error).__name__}: {line}"


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Disable garbage collection: freeing a tensor can invalidate a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
