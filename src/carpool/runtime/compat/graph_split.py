"""Graph split: cut a captured CUDA graph after its linear prefix, before its first fork.

Without MPS a GPU works for one process at a time, in time slices, and skips a process whose next work waits for memory
(`stream_signal`). Branches of a graph, however, run on channels of their own that wait for each other, and such a wait
occupies the GPU until its slice ends: a queued graph with branches costs the process that computes milliseconds (1.3 ms
and more for DeepSpeech, whose recurrent layers run in two directions). The prefix has no branches and may be queued;
the host launches the rest while the GPU executes the prefix.
"""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections.abc import Collection, Sequence
from typing import Any

from carpool.runtime.compat.cuda_driver import CudaDriverError, call, load

Edge = tuple[int, int]
_EDGE_DATA_BYTES = 8  # cuda.h: sizeof(CUgraphEdgeData)


def linear_prefix(nodes: Collection[int], edges: Sequence[Edge]) -> list[int]:
    """Return the nodes that run one after another before anything runs in parallel, in order.

    The last of them is the one that forks. A graph with several first nodes has no such prefix.
    """
    successors: dict[int, list[int]] = {node: [] for node in nodes}
    predecessors: dict[int, list[int]] = {node: [] for node in nodes}
    for start, end in edges:
        successors[start].append(end)
        predecessors[end].append(start)
    prefix = [node for node in nodes if not predecessors[node]]
    if len(prefix) != 1:
        return []
    while len(following := successors[prefix[-1]]) == 1 and len(predecessors[following[0]]) == 1:
        prefix.append(following[0])
    return prefix


class GraphTail:
    """The part of a CUDA graph after its linear prefix, instantiated as a graph of its own."""

    def __init__(self, graph: ctypes.c_void_p) -> None:
        self._executable = ctypes.c_void_p()
        call("cuGraphInstantiateWithFlags", ctypes.byref(self._executable), graph, ctypes.c_ulonglong(0))
        weakref.finalize(self, load().cuGraphExecDestroy, self._executable).atexit = False

    def launch(self, stream: int) -> None:
        call("cuGraphLaunch", self._executable, ctypes.c_void_p(stream))


def is_branched(graph: int) -> bool:
    """Whether a CUDA graph, given by its handle, has branches; False if the driver cannot tell."""
    try:
        nodes, edges = _read(ctypes.c_void_p(graph))
    except CudaDriverError:
        return False
    return len(linear_prefix(nodes, edges)) < len(nodes)


def split_at_fork(graph: int) -> GraphTail | None:
    """Reduce a CUDA graph that is not instantiated yet to its linear prefix, and return the rest.

    None, with the graph unchanged, where the driver cannot do it or there is no prefix.
    """
    whole, clone = ctypes.c_void_p(graph), ctypes.c_void_p()
    try:
        nodes, edges = _read(whole)
        prefix = set(linear_prefix(nodes, edges))
        if not prefix:
            return None
        call("cuGraphClone", ctypes.byref(clone), whole)
        with contextlib.ExitStack() as stack:
            stack.callback(load().cuGraphDestroy, clone)
            for twin in [_cloned_node(node, clone) for node in prefix]:
                call("cuGraphDestroyNode", twin)
            tail = GraphTail(clone)
    except CudaDriverError:
        return None
    for node in nodes:
        if node not in prefix:
            call("cuGraphDestroyNode", ctypes.c_void_p(node))
    return tail


def _cloned_node(node: int, clone: ctypes.c_void_p) -> ctypes.c_void_p:
    found = ctypes.c_void_p()
    call("cuGraphNodeFindInClone", ctypes.byref(found), ctypes.c_void_p(node), clone)
    return found


def _read(graph: ctypes.c_void_p) -> tuple[list[int], list[Edge]]:
    """Return the nodes and edges of a graph; the driver is asked for their numbers first."""
    num_nodes, num_edges = ctypes.c_size_t(), ctypes.c_size_t()
    call("cuGraphGetNodes", graph, None, ctypes.byref(num_nodes))
    call("cuGraphGetEdges_v2", graph, None, None, None, ctypes.byref(num_edges))
    nodes, starts, ends = _handles(num_nodes), _handles(num_edges), _handles(num_edges)
    data = (ctypes.c_char * (_EDGE_DATA_BYTES * num_edges.value))()
    if num_nodes.value:
        call("cuGraphGetNodes", graph, nodes, ctypes.byref(num_nodes))
    if num_edges.value:
        call("cuGraphGetEdges_v2", graph, starts, ends, data, ctypes.byref(num_edges))
    return list(nodes), list(zip(starts, ends, strict=True))


def _handles(count: ctypes.c_size_t) -> Any:
    return (ctypes.c_void_p * count.value)()
