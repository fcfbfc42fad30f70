"""CUDA graph capture and replay."""

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

# A recording keeps raw addresses. Whoever replays it holds on to every tensor it reads or writes.


def no_op() -> None:
    """Do nothing."""


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """A recording, to be done again."""

    head: Callable[[], None]  # one chain of work: it may stand queued on a device on which another process computes
    rest: Callable[[], None] = no_op  # what comes behind the first fork: it may not (compat/graph_split.py)

    def __call__(self) -> None:
        """Do all of it."""
        self.head()
        self.rest()


class GraphCapture(Protocol):
    """Makes recordings."""

    has_branches: bool  # a recording so far was not one chain of work

    def aside(self) -> contextlib.AbstractContextManager[None]:
        """What is done inside runs where recordings are made, so that libraries set themselves up there."""
        ...

    def record(self, work: Callable[[], None], *, leads: bool = False) -> CapturedGraph:
        """Record what `work` does, without doing it. After an error, earlier recordings are void.

        ``leads``: a step begins with it, so that as much of it as can be is its head.
        """
        ...

    def start_over(self) -> None:
        """All recordings so far have been let go."""
        ...

    def bring(self, value: Tensor, to: Tensor) -> None:
        """Begin to copy a number to the host; what the device is told later does not wait for it."""
        ...

    def wait(self) -> None:
        """Wait until it is there."""
        ...


class CudaGraphCapture:
    """Records on a stream of its own, all recordings of a job in one pool of memory."""

    def __init__(self, device: torch.device, scratch: ScratchPool | None = None) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._scratch = scratch  # a pool that outlives its recordings
        self._pool = self._new_pool()
        self._errands = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._is_made = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._is_here = torch.cuda.Event()  # type: ignore[no-untyped-call]
        # torch lets go of what it knows of a pool with its last recording, and refuses that pool for ever.
        self.has_branches = False
        self._anchor = None if scratch is None else self.record(lambda: torch.zeros(1, device=device))

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Run on the stream of recordings, after all that was said before and before all that is said later."""
        usual = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(usual)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            usual.wait_stream(self._stream)

    def record(self, work: Callable[[], object], *, leads: bool = False) -> CapturedGraph:
        """Record what `work` does; other threads may go on using the device meanwhile."""
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # what the code's own passes used is not in our pool
        with self.aside(), _no_collection():
            try:
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                work()
                graph.capture_end()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # it fails too, and says less than what brought us here
                    graph.capture_end()
                self._mend()
                raise
        has_branches = is_branched(graph.raw_cuda_graph())
        self.has_branches |= has_branches
        behind = split_at_fork(graph.raw_cuda_graph()) if leads and has_branches else None
        graph.instantiate()
        if behind is not None:
            return CapturedGraph(
                graph.replay, lambda: behind.launch(torch.cuda.current_stream(self._device).cuda_stream)
            )
        return CapturedGraph(no_op, graph.replay) if has_branches else CapturedGraph(graph.replay)

    def start_over(self) -> None:
        """Take another pool: the one whose last recording was let go is gone."""
        self._pool = self._new_pool()

    def _new_pool(self) -> Any:
        return torch.cuda.graph_pool_handle() if self._scratch is None else self._scratch.id

    def bring(self, value: Tensor, to: Tensor) -> None:
        """Copy a number to pinned memory on a stream of its own.

        In the stream of the recordings, each step would wait for the copy engine between its passes.
        """
        self._is_made.record(torch.cuda.current_stream(self._device))
        self._errands.wait_event(self._is_made)
        with torch.cuda.stream(self._errands):
            to.copy_(value, non_blocking=True)
        self._is_here.record(self._errands)

    def wait(self) -> None:
        """Wait until the number has arrived."""
        self._is_here.synchronize()

    def _mend(self) -> None:
        """Put right what torch leaves undone when a recording fails.

        Its allocator goes on giving to the pool, and the random generator believes that it is being recorded. The
        generator gets another state, so recordings made before draw from the old one: they must not be used any more.
        """
        index = self._device.index or 0
        end_allocation_to_pool(index, self._pool)
        self.start_over()
        generator = torch.cuda.default_generators[index]
        generator.graphsafe_set_state(torch.Generator(self._device).graphsafe_get_state())


def capture_failure(error: BaseException) -> str:
    """Why something was not recorded: the first line of what went wrong."""
    line = str(error).strip().partition("\n")[0]
    return f"it cannot be recorded: {type(error).__name__}: {line}"


@contextmanager
def _no_collection() -> Iterator[None]:
    """A tensor that is collected while recording could end the recording."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
