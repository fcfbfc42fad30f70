"""Where a recording stops being one chain of work and gets branches that run beside each other.

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
import weakref
from collections.abc import Collection, Sequence
from typing import Any

Edge = tuple[int, int]
_EDGE_DATA = 8  # bytes of what the driver says of an edge beside its ends


def chain(nodes: Collection[int], edges: Sequence[Edge]) -> list[int]:
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


class Rest:
    """What comes behind the first fork of a CUDA graph, as a graph of its own."""

    def __init__(self, cuda: ctypes.CDLL, graph: ctypes.c_void_p) -> None:
        self._cuda = cuda
        self._ready = ctypes.c_void_p()
        _check(cuda.cuGraphInstantiateWithFlags(ctypes.byref(self._ready), graph, ctypes.c_ulonglong(0)))
        weakref.finalize(self, cuda.cuGraphExecDestroy, self._ready).atexit = False

    def launch(self, stream: int) -> None:
        """Do it, behind all that the stream (its handle) was told before."""
        _check(self._cuda.cuGraphLaunch(self._ready, ctypes.c_void_p(stream)))


def branches(graph: int) -> bool:
    """Whether a CUDA graph (its handle) has branches; no, where the driver does not say."""
    try:
        nodes, edges = _read(ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(graph))
    except (OSError, AttributeError):
        return False
    return len(chain(nodes, edges)) < len(nodes)


def cut(graph: int) -> Rest | None:
    """Leave of a CUDA graph that has not been instantiated what comes before its first fork, and give the rest.

    None where the driver does not do it, or the graph begins with a fork: then all is left as it was.
    """
    whole, clone = ctypes.c_void_p(graph), ctypes.c_void_p()
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        nodes, edges = _read(cuda, whole)
        first = set(chain(nodes, edges))
        if not first:
            return None
        _check(cuda.cuGraphClone(ctypes.byref(clone), whole))
        with contextlib.ExitStack() as stack:
            stack.callback(cuda.cuGraphDestroy, clone)
            twins = [_twin(cuda, node, clone) for node in first]
            for twin in twins:
                _check(cuda.cuGraphDestroyNode(twin))
            rest = Rest(cuda, clone)
    except (OSError, AttributeError):
        return None
    for node in nodes:
        if node not in first:
            _check(cuda.cuGraphDestroyNode(ctypes.c_void_p(node)))
    return rest


def _twin(cuda: ctypes.CDLL, node: int, clone: ctypes.c_void_p) -> ctypes.c_void_p:
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
