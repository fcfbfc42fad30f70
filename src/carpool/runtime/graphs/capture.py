"""CUDA graph capture and replay; splits a captured graph at its first fork.

Without MPS a GPU serves one process per time slice and skips a process whose queued work waits for a memory word
(sharing/device_handoff.py). Branches of a graph, however, run on channels that wait for each other, and such a wait
keeps the GPU busy until its slice ends: a queued graph with branches costs the running process milliseconds (1.3 ms and
more for DeepSpeech with its bidirectional layers).

So a graph is split at its first fork. The linear head may be queued early; the host launches the tail while the GPU
runs the head.
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


def no_op() -> None:
    """Do nothing."""


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """A captured graph to replay; it holds raw addresses, so the caller must keep all its tensors alive."""

    head: Callable[[], None]  # linear: may be queued while another process uses the device
    tail: Callable[[], None] = no_op  # from the first fork on: may not

    def __call__(self) -> None:
        self.head()
        self.tail()


class GraphCapture(Protocol):
    """Captures graphs, and copies a loss to the host beside their replay."""

    has_branches: bool  # some graph captured so far was not linear

    def side_stream(self) -> contextlib.AbstractContextManager[None]:
        """Run on the capture stream, so that libraries initialize themselves for it."""
        ...

    def capture(self, work: Callable[[], None], *, starts_step: bool = False) -> CapturedGraph:
        """Capture `work` without running it; an error invalidates earlier graphs.

        ``starts_step``: split the graph at its first fork, so that its head can be queued early.
        """
        ...

    def reset(self) -> None:
        """Start a new memory pool after all graphs were dropped."""
        ...

    def copy_to_host(self, value: Tensor, target: Tensor) -> None:
        """Start copying a number to the host; later kernels do not wait for it."""
        ...

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
                with contextlib.suppress(RuntimeError):  # the first error says more
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
        with contextlib.suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(index, self._pool)  # type: ignore[attr-defined, unused-ignore]
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
