"""Process-group reducer: sums contributions across nodes in a process group of one epoch.

Default mode adds up with one all-reduce: the same on every rank, and the one-device gradient within rounding. In exact
mode every rank sends its maximal subtrees to all, and each adds them in the one binary tree, bit for bit what shared
memory gives: an all-reduce adds in an order that depends on the number of ranks.

A group is never repaired. Whoever hears that a peer is gone, from the group or from elsewhere, drops the reducer and
makes one for the next epoch; that is also what frees those who still wait for the dead one (`abort` does not).

Groups are gloo's, on CPU tensors. NCCL's, between GPUs, differ in nothing here but the class and the tensors' device;
they have not been tried between several GPUs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from carpool.runtime.compat.torch_api import new_process_group
from carpool.runtime.engine.flat_buffers import Contribution, FlatLayout
from carpool.runtime.engine.forward_backward import Contributions, ContributionSlots, Step
from carpool.runtime.reduce.reducer import StepAborted
from carpool.runtime.reduce.shards import Subtree, is_empty, maximal_nodes, root, tree_sum
from carpool.runtime.reduce.shm_layout import Owners

_LOOK_S = 2e-4  # between two looks whether a message has come
_LONG_S = 0.05  # after which nobody looks that often


class PeerLost(StepAborted):
    """A rank of the group is gone, or somebody says so: the step must be made again in another epoch."""


def open_group(store: Any, epoch: int, rank: int, size: int, *, backend: str = "gloo", timeout_s: float = 60.0) -> Any:
    """Join the group of an epoch; every epoch has names of its own in the store, so that none meets an older one."""
    timeout = timedelta(seconds=timeout_s)
    try:
        return new_process_group(store, f"epoch-{epoch}", rank, size, backend=backend, timeout=timeout)
    except RuntimeError as error:
        raise PeerLost(f"the group of epoch {epoch} did not come together: {_first_line(error)}") from error


class ProcessGroupReducer:
    """Adds up over a process group.

    ``interrupted`` is asked while waiting: when it says yes, `PeerLost` is raised and the reducer is to be dropped.
    """

    def __init__(
        self,
        group: Any,
        rank: int,
        owners: Owners,
        layout: FlatLayout,
        *,
        exact: bool,
        interrupted: Callable[[], bool] = lambda: False,
        on_device: bool = False,
    ) -> None:
        self._on_device = on_device  # NCCL sends from the device itself
        self._group = group
        self._rank = rank
        self._nodes = [maximal_nodes(range(*pieces)) for pieces in owners]
        self._layout = layout
        self._exact = exact
        self._interrupted = interrupted
        self._mine: dict[Subtree, Contribution | None] = {}

    def places(self, step: Step, rank: int) -> ContributionSlots:
        """Nowhere: what is sent must lie in memory of this process."""
        return {}

    def write(self, step: Step, gathered: Contributions) -> None:
        """Keep this rank's subtrees until all are ready to add up; in host memory, which is what gloo sends."""
        self._mine = {node: None if made is None else self._sent(made) for node, made in gathered}

    @torch.no_grad()
    def total(self, step: Step) -> Contribution:
        """The sum of all contributions to a step."""
        total = self._gathered(step) if self._exact else self._reduced(step)
        device = self._layout.device
        return Contribution(total.values.to(device), total.integers.to(device))

    def _reduced(self, step: Step) -> Contribution:
        """One all-reduce; integer buffers come from the first rank that has samples, as everywhere."""
        (own,) = self._mine.values()
        total = self._sent(self._layout.new()) if own is None else own
        self._wait(self._group.allreduce([total.values]))
        if total.integers.numel():
            first = next(rank for rank, (node,) in enumerate(self._nodes) if not is_empty(node, step.bounds))
            self._wait(self._group.broadcast(total.integers, first))
        return total

    def _gathered(self, step: Step) -> Contribution:
        """Every rank's subtrees to every rank, then all of them in tree order."""
        held: Contributions = []
        for rank, nodes in enumerate(self._nodes):
            for node in nodes:
                if is_empty(node, step.bounds):
                    held.append((node, None))
                    continue
                sent = self._mine[node] if rank == self._rank else self._sent(self._layout.new())
                assert sent is not None, "a node with samples has a contribution"
                self._send(sent.values, rank)
                self._send(sent.integers, rank)
                held.append((node, sent))
        total = tree_sum(held, root(len(step.bounds)), _add)
        assert total is not None, "a step has samples"
        return total

    def _sent(self, made: Contribution) -> Contribution:
        return made if self._on_device else Contribution(made.values.cpu(), made.integers.cpu())

    def _send(self, tensor: Tensor, rank: int) -> None:
        if tensor.numel():
            self._wait(self._group.broadcast(tensor, rank))

    def _wait(self, work: Any) -> None:
        """Wait for a message, ready to be told that it will not come."""
        began = time.monotonic()
        try:
            while not work.is_completed():
                if self._interrupted():
                    raise PeerLost("told that a peer is gone")
                time.sleep(_LOOK_S if time.monotonic() - began < _LONG_S else 10 * _LOOK_S)
            work.wait()
        except RuntimeError as error:
            raise PeerLost(f"a peer is gone: {_first_line(error)}") from error


def _add(left: Contribution, right: Contribution) -> Contribution:
    left += right
    return left


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
