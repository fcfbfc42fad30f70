"""CUDA graph capture and replay; splits a captured graph at its first fork.

A GPU works for one process at a time (without MPS), a slice of time each. A process whose next work waits for memory
(baton.py) is passed over. But branches of a recording go to channels of their own that wait for each other, and such
a wait holds the GPU until its slice ends: a recording with branches that stands queued takes milliseconds from whoever
computes (DeepSpeech's, whose recurrent layers go in two directions, 1.3 ms and more from each of the two before it).

So a recording is cut at its first fork. The chain before it may stand queued, as a recording without branches does, and
the host launches the rest while the GPU is at that chain.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from carpool.runtime.compat.vmm import ScratchPool

Edge = tuple[int, int]
_EDGE_DATA = 8  # bytes of what the driver says of an edge beside its ends


def linear_prefix(nodes: Collection[int], edges: Sequence[Edge]) -> list[int]:
    """The nodes that come one after another before anything runs beside them, in this order; all, without a fork.

    What forks is the last of them. Where work has several begins there are none.
    """
    after: dict[int, list[int]] = {node: [] for node in nodes}
    before: dict[int, list[int]] = {node: [] for node in nodes}
    for start, end in edges:
        after[start].append(end)
        before[end].append(start)
    firsts = [node for node in nodes if not before[node]]
    if len(firsts) != 1:
        return []
    found = firsts
    while len(follows := after[found[-1]]) == 1 and len(before[follows[0]]) == 1:
        found.append(follows[0])
    return found


class GraphTail:
    """What comes behind the first fork of a CUDA graph, as a graph of its own."""

    def __init__(self, cuda: ctypes.CDLL, graph: ctypes.c_void_p) -> None:
        self._cuda = cuda
        self._ready = ctypes.c_void_p()
        _check(cuda.cuGraphInstantiateWithFlags(ctypes.byref(self._ready), graph, ctypes.c_ulonglong(0)))
        weakref.finalize(self, cuda.cuGraphExecDestroy, self._ready).atexit = False

    def launch(self, stream: int) -> None:
        """Do it, behind all that the stream (its handle) was told before."""
        _check(self._cuda.cuGraphLaunch(self._ready, ctypes.c_void_p(stream)))


def is_branched(graph: int) -> bool:
    """Whether a CUDA graph (its handle) has branches; no, where the driver does not say."""
    try:
        nodes, edges = _read(ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(graph))
    except (OSError, AttributeError):
        return False
    return len(linear_prefix(nodes, edges)) < len(nodes)


def split_at_fork(graph: int) -> GraphTail | None:
    """Leave of a CUDA graph that has not been instantiated what comes before its first fork, and give the rest.

    None where the driver does not do it, or the graph begins with a fork: then all is left as it was.
    """
    whole, clone = ctypes.c_void_p(graph), ctypes.c_void_p()
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        nodes, edges = _read(cuda, whole)
        first = set(linear_prefix(nodes, edges))
        if not first:
            return None
        _check(cuda.cuGraphClone(ctypes.byref(clone), whole))
        with contextlib.ExitStack() as stack:
            stack.callback(cuda.cuGraphDestroy, clone)
            twins = [_cloned_node(cuda, node, clone) for node in first]
            for twin in twins:
                _check(cuda.cuGraphDestroyNode(twin))
            rest = GraphTail(cuda, clone)
    except (OSError, AttributeError):
        return None
    for node in nodes:
        if node not in first:
            _check(cuda.cuGraphDestroyNode(ctypes.c_void_p(node)))
    return rest


def _cloned_node(cuda: ctypes.CDLL, node: int, clone: ctypes.c_void_p) -> ctypes.c_void_p:
    """The node of a clone that was made of a node."""
    found = ctypes.c_void_p()
    _check(cuda.cuGraphNodeFindInClone(ctypes.byref(found), ctypes.c_void_p(node), clone))
    return found


def _read(cuda: ctypes.CDLL, graph: ctypes.c_void_p) -> tuple[list[int], list[Edge]]:
    """The nodes of a graph, and its edges."""
    num_nodes, num_edges = ctypes.c_size_t(), ctypes.c_size_t()
    _check(cuda.cuGraphGetNodes(graph, None, ctypes.byref(num_nodes)))
    _check(cuda.cuGraphGetEdges_v2(graph, None, None, None, ctypes.byref(num_edges)))
    nodes, starts, ends = _handles(num_nodes), _handles(num_edges), _handles(num_edges)
    data = (ctypes.c_char * (_EDGE_DATA * num_edges.value))()
    if num_nodes.value:
        _check(cuda.cuGraphGetNodes(graph, nodes, ctypes.byref(num_nodes)))
    if num_edges.value:
        _check(cuda.cuGraphGetEdges_v2(graph, starts, ends, data, ctypes.byref(num_edges)))
    return list(nodes), list(zip(starts, ends, strict=True))


def _handles(count: ctypes.c_size_t) -> Any:
    return (ctypes.c_void_p * count.value)()


def _check(code: int) -> None:
    if code:
        raise OSError(f"the driver answers {code}")


# A recording keeps raw addresses. Whoever replays it holds on to every tensor it reads or writes.


def no_op() -> None:
    """Do nothing."""


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """A recording, to be done again."""

    head: Callable[[], None]  # one chain of work: it may stand queued on a device on which another process computes
    rest: Callable[[], None] = no_op  # what comes behind the first fork: it may not (branching.py)

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
        with contextlib.suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(index, self._pool)  # type: ignore[attr-defined, unused-ignore]
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
