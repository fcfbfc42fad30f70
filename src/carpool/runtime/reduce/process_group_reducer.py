"""Process-group reducer: sums contributions across nodes in a process group of one epoch.

Collectives run in gloo's threads until `total` waits for them. In default mode all-reduces of a few megabytes sum the
gradients, each as soon as the backward pass has completed those it holds: every rank gets the same sum, equal to the
one-device gradient up to rounding. In exact mode every rank broadcasts its maximal subtrees and each adds them in the
one binary tree, bitwise like shared memory (the order of an all-reduce depends on the number of ranks).

A group is never repaired. When a peer is lost, a worker deletes the reducer and creates one for the next epoch.
Deleting it closes the group and unblocks ranks that wait for the lost peer; `abort` would not.

Groups use gloo, which sends tensors in host memory.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch

from carpool.runtime.compat.torch_api import new_process_group
from carpool.runtime.engine.early_gradients import GradientsReady
from carpool.runtime.engine.flat_buffers import Contribution, FlatLayout
from carpool.runtime.engine.forward_backward import Contributions, ContributionSlots, Step, add_contributions
from carpool.runtime.reduce.reducer import StepAborted
from carpool.runtime.reduce.shards import Subtree, is_empty, maximal_subtrees, root, tree_sum
from carpool.runtime.reduce.shm_layout import Owners

JOIN_S = 20.0  # for all ranks to join a process group; they are ordered to at the same moment
# For the slowest rank of a step. A lost process or machine is noticed by the executors long before; this is for a
# connection between two ranks that was cut silently.
COLLECTIVE_S = 600.0
BUCKET_BYTES = (
    4 << 20
)  # of gradients summed by one all-reduce; with less, threads of gloo take time from the backward pass
_POLL = timedelta(milliseconds=20)  # between looks for new orders


class PeerLost(StepAborted):
    """A rank of the group is lost, or reported lost: the step must be repeated in another epoch."""


def open_group(
    store: Any,
    epoch: int,
    rank: int,
    size: int,
    address: str = "127.0.0.1",
    *,
    join_s: float = JOIN_S,
    collective_s: float = COLLECTIVE_S,
) -> Any:
    """Join the group of an epoch; each epoch has its own prefix in the store, and each rank listens at an address."""
    join, collective = timedelta(seconds=join_s), timedelta(seconds=collective_s)
    prefix = f"epoch-{epoch}"
    try:
        return new_process_group(store, prefix, rank, size, join=join, collective=collective, address=address)
    except RuntimeError as error:
        raise PeerLost(f"the process group of epoch {epoch} was not formed: {_first_line(error)}") from error


class ProcessGroupReducer:
    """Sums over a process group; drop it after `PeerLost`.

    ``is_aborted`` is polled while waiting: once it returns true, `PeerLost` is raised.
    """

    def __init__(
        self,
        group: Any,
        rank: int,
        owners: Owners,
        layout: FlatLayout,
        *,
        exact: bool,
        is_aborted: Callable[[], bool] = lambda: False,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._group = group
        self._rank = rank
        self._nodes = [maximal_subtrees(range(*pieces)) for pieces in owners]
        self._layout = layout
        self._exact = exact
        self._is_aborted = is_aborted
        self._received: dict[Subtree, Contribution] = {}  # memory for the contributions of others
        self._pending: list[Any] = []  # collectives under way
        self._written: Contributions = []  # what they sum or exchange
        self._slot: Contribution | None = None  # of the default mode, on a CPU
        self._buckets = _buckets(layout, bucket_bytes)
        self._num_sent = 0  # buckets of this step

    def slots(self, step: Step, rank: int) -> ContributionSlots:
        """In default mode on a CPU, memory that is kept from step to step."""
        if self.ready is None:
            return {}
        if self._slot is None:
            self._slot = self._layout.new()
        (node,) = self._nodes[rank]
        return {node: self._slot}

    @property
    def ready(self) -> GradientsReady | None:
        return None if self._exact or self._layout.device.type != "cpu" else self._send_buckets

    def _send_buckets(self, contribution: Contribution, start: int) -> None:
        """Start to sum the buckets that lie at `start` or behind it."""
        while self._num_sent < len(self._buckets) and self._buckets[self._num_sent].start >= start:
            bucket = self._buckets[self._num_sent]
            self._pending.append(self._group.allreduce([contribution.values[bucket.start : bucket.stop]]))
            self._num_sent += 1

    @torch.no_grad()
    def write(self, step: Step, contributions: Contributions) -> None:
        own = {node: None if made is None else _on_host(made) for node, made in contributions}
        if self._exact:
            self._written = self._start_broadcasts(step, own)
        else:
            (node, made) = next(iter(own.items()))
            self._written = [(node, self._start_all_reduce(step, made))]

    @torch.no_grad()
    def total(self, step: Step) -> Contribution:
        pending, self._pending, self._num_sent = self._pending, [], 0
        for work in pending:
            self._wait(work)
        total = (
            tree_sum(self._written, root(len(step.bounds)), add_contributions) if self._exact else self._written[0][1]
        )
        assert total is not None, "a step has samples"
        device = self._layout.device
        return Contribution(total.values.to(device), total.integers.to(device))

    def _start_all_reduce(self, step: Step, own: Contribution | None) -> Contribution:
        """Sum the vectors; integer buffers come from the first rank with samples."""
        total = _on_host(self._layout.new()) if own is None else own
        self._send_buckets(total, 0)
        end = self._buckets[0].stop if self._buckets else 0
        self._pending.append(self._group.allreduce([total.values[end:]]))
        if total.integers.numel():
            first = next(rank for rank, (node,) in enumerate(self._nodes) if not is_empty(node, step.bounds))
            self._pending.append(self._group.broadcast(total.integers, first))
        return total

    def _start_broadcasts(self, step: Step, own: Mapping[Subtree, Contribution | None]) -> Contributions:
        self._pending = []
        contributions: Contributions = []
        for rank, nodes in enumerate(self._nodes):
            for node in nodes:
                if is_empty(node, step.bounds):
                    contributions.append((node, None))
                    continue
                contribution = own[node] if rank == self._rank else self._memory_for(node)
                assert contribution is not None, "a subtree with samples has a contribution"
                for tensor in (contribution.values, contribution.integers):
                    if tensor.numel():
                        self._pending.append(self._group.broadcast(tensor, rank))
                contributions.append((node, contribution))
        return contributions

    def _memory_for(self, node: Subtree) -> Contribution:
        if node not in self._received:
            self._received[node] = _on_host(self._layout.new())
        return self._received[node]

    def _wait(self, work: Any) -> None:
        """Wait for a collective; blocked most of the time, because a loop would take the core from gloo's threads."""
        while not work.is_completed():
            with contextlib.suppress(RuntimeError):  # a timeout, or the error that the last call below raises again
                work.wait(_POLL)
                return
            if not work.is_completed() and self._is_aborted():
                raise PeerLost("the step was aborted while waiting for a peer")
        try:  # it may have succeeded just after a timeout
            work.wait()
        except RuntimeError as error:
            raise PeerLost(f"a peer is lost: {_first_line(error)}") from error


def _buckets(layout: FlatLayout, num_bytes: int) -> list[range]:
    """The gradients in pieces of at least `num_bytes`, from the end on; none if they all fit into one.

    Those are then summed together with the rest of the vector.
    """
    least = num_bytes // layout.dtype.itemsize
    ends = [layout.gradients.stop]
    for offset in reversed(layout.gradient_offsets):
        if ends[-1] - offset >= least:
            ends.append(offset)
    if ends[-1]:
        ends.append(0)
    found = [range(start, stop) for stop, start in itertools.pairwise(ends)]
    return found if len(found) > 1 else []


def _on_host(contribution: Contribution) -> Contribution:
    return Contribution(contribution.values.cpu(), contribution.integers.cpu())


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
