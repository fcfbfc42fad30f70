"""Whether a recording is one chain of work, or has branches that run beside each other.

A GPU works for one process at a time (without MPS), a slice of time each. A process whose next work waits for memory
(baton.py) is passed over. But branches of a recording go to channels of their own that wait for each other, and such
a wait holds the GPU until its slice ends: a recording with branches that stands queued takes milliseconds from whoever
computes (DeepSpeech's, whose recurrent layers go in two directions, 1.3 ms and more from each of the two before it).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

Edge = tuple[int, int]
_EDGE_DATA = 8  # bytes of what the driver says of an edge beside its ends


def is_chain(num_nodes: int, edges: Sequence[Edge]) -> bool:
    """Whether each node but the last is followed by one other, and no two by the same."""
    starts, ends = {start for start, _ in edges}, {end for _, end in edges}
    return len(edges) == max(0, num_nodes - 1) and len(starts) == len(ends) == len(edges)


def branches(graph: int) -> bool:
    """Whether a CUDA graph (its handle) has branches; no, where the driver does not say."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        return not is_chain(*_read(cuda, ctypes.c_void_p(graph)))
    except (OSError, AttributeError):
        return False


def _read(cuda: ctypes.CDLL, graph: ctypes.c_void_p) -> tuple[int, list[Edge]]:
    """How many nodes a graph has, and its edges."""
    num_nodes, num_edges = ctypes.c_size_t(), ctypes.c_size_t()
    _check(cuda.cuGraphGetNodes(graph, None, ctypes.byref(num_nodes)))
    _check(cuda.cuGraphGetEdges_v2(graph, None, None, None, ctypes.byref(num_edges)))
    count = num_edges.value
    starts, ends, data = (
        (ctypes.c_void_p * count)(),
        (ctypes.c_void_p * count)(),
        (ctypes.c_char * (_EDGE_DATA * count))(),
    )
    if count:
        _check(cuda.cuGraphGetEdges_v2(graph, starts, ends, data, ctypes.byref(num_edges)))
    return num_nodes.value, list(zip(starts, ends, strict=True))


def _check(code: int) -> None:
    if code:
        raise OSError(f"the driver answers {code}")
