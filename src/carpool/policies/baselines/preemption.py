"""Preemption of lower-ranked gangs, shared by all preemptive policies with a job order.

An `Entry` is (rank, order of submission, job); lower comes first. Ranks of waiting and of running jobs must be
comparable with each other at the instant of the plan. A gang sits on devices of one kind. The first in the order does
not block others: a job that fits nowhere, even by preempting all jobs behind it, is skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import merge

from carpool.core.draft import Draft
from carpool.core.model import Allocation, Job, JobId, Kind
from carpool.core.occupancy import Occupancy
from carpool.core.placement import PlacementRule, consolidated
from carpool.core.queue import Demand, Entry, demand_of
from carpool.core.topology import Cluster, Node

Kinds = Callable[[Job], Sequence[Kind]]  # device types a job may use, preferred first
WaitingEntries = Callable[[set[Demand]], Iterable[Entry]]  # entries in order, without those of refused demands
Running = Callable[[Entry], Sequence[Entry]]  # entries in order, at least those behind the given one

_Held = tuple[tuple[int, int], ...]  # (node, devices) pairs


@dataclass(slots=True)
class PreemptionResult:
    """Jobs started and released, and those without room.

    `refused` has the first job of each demand that did not fit, and how many more devices must come free before it
    can. `left` is the first job that stays waiting.
    """

    started: dict[JobId, Entry] = field(default_factory=dict)
    released: dict[JobId, Entry] = field(default_factory=dict)
    refused: dict[Demand, tuple[Entry, int]] = field(default_factory=dict)
    left: Entry | None = None

    def words(self) -> str:
        return f"{len(self.started)} started, {len(self.released)} preempted"

    def __bool__(self) -> bool:
        return bool(self.started or self.released)


def among(entries: Sequence[Entry], jobs: Mapping[JobId, Job]) -> WaitingEntries:
    """Sorted entries as a source for `preempt`."""

    def offered(refused: set[Demand]) -> Iterator[Entry]:
        return (entry for entry in entries if demand_of(jobs[entry[2]]) not in refused)

    return offered


def preempt(
    draft: Draft,
    waiting: WaitingEntries,
    running: Running,
    *,
    rule: PlacementRule = consolidated,
    kinds: Kinds | None = None,
) -> PreemptionResult:
    """Start waiting jobs in order, on free devices or by preempting the lowest-ranked running jobs behind them.

    `running` is called only if free devices do not suffice; it may leave out jobs that must not be preempted. Only
    jobs whose devices are needed are released, and restored if they turn out not to be. Devices left over go to the
    first jobs that fit, preempted ones included.
    """
    contest = _Contest(draft, running, rule, kinds or draft.kinds_for)
    contest.settle(waiting)
    if contest.outcome.released and draft.num_free:
        contest.fill_up(waiting)
    return contest.outcome


class _Contest:
    """Waiting jobs against running ones, on one draft."""

    __slots__ = ("_ask", "_draft", "_jobs", "_kinds", "_last", "_rule", "_running", "outcome")

    def __init__(self, draft: Draft, running: Running, rule: PlacementRule, kinds: Kinds) -> None:
        self._draft = draft
        self._jobs = draft.view.jobs
        self._ask = running
        self._running: Sequence[Entry] | None = None  # once queried
        self._last = -1  # the lowest-ranked one not yet released
        self._rule = rule
        self._kinds = kinds
        self.outcome = PreemptionResult()

    def settle(self, waiting: WaitingEntries) -> None:
        """Go through the waiting jobs until nothing is free and no running job ranks behind."""
        draft, refused = self._draft, set[Demand]()
        for entry in waiting(refused):
            if not draft.num_free and not self._has_behind(entry):
                self.outcome.left = self.outcome.left or entry
                return
            job = self._jobs[entry[2]]
            kinds = self._kinds(job)
            short = 0
            if not draft.num_free or not draft.place(job, kinds=kinds, rule=self._rule):
                short = self._displace(job, entry, kinds)
            if not short:
                self.outcome.started[job.id] = entry
                continue
            self.outcome.left = self.outcome.left or entry
            if not job.spec.memory_bytes:  # memory is not part of a demand
                refused.add(demand_of(job))
                self.outcome.refused[demand_of(job)] = (entry, short)

    def fill_up(self, waiting: WaitingEntries) -> None:
        draft, refused, outcome = self._draft, set[Demand](), self.outcome
        for entry in merge(waiting(refused), sorted(outcome.released.values())):
            if not draft.num_free:
                return
            job = self._jobs[entry[2]]
            if job.id in outcome.started or demand_of(job) in refused:
                continue
            if draft.place(job, kinds=self._kinds(job), rule=self._rule):
                outcome.started[job.id] = entry
                outcome.released.pop(job.id, None)
            elif not job.spec.memory_bytes:
                refused.add(demand_of(job))

    def _has_behind(self, entry: Entry) -> bool:
        running = self._running
        if running is None:
            running = self._running = self._ask(entry)
            self._last = len(running) - 1
        while self._last >= 0 and running[self._last][2] in self.outcome.released:
            self._last -= 1
        return self._last >= 0 and running[self._last] > entry

    def _displace(self, job: Job, entry: Entry, kinds: Sequence[Kind]) -> int:
        """Replace lower-ranked running jobs by a waiting one, on the first device type where that is possible.

        Returns 0 then, else how many devices must come free at least.
        """
        draft, jobs = self._draft, self._jobs
        self._has_behind(entry)
        shortest = job.spec.devices
        for kind in kinds:
            if kind not in draft.view.cluster.capacity:
                continue
            room = _Room(draft.occupancy, kind, job.spec.devices, whole_nodes=self._rule is consolidated)
            victims = self._victims(room, entry, kind)
            if victims is None:
                shortest = min(shortest, room.short)
                continue
            for _, _, victim in victims:
                draft.release(jobs[victim])
            placed = draft.place(job, kinds=(kind,), rule=self._rule)
            assert placed, f"devices were freed for {job.id!r}, yet it does not fit"
            for other in reversed(victims):  # the most important first
                if len(victims) == 1 or not draft.restore(jobs[other[2]]):
                    self.outcome.released[other[2]] = other
            return 0
        return shortest

    def _victims(self, room: _Room, entry: Entry, kind: Kind) -> list[Entry] | None:
        """Jobs to release, lowest rank first, so that a gang fits; None when that is not enough.

        Going up from the lowest rank, the first node (or nodes) to have room is taken, so that the highest-
        ranked victim ranks as low as possible.
        """
        cluster, running, jobs, gone = self._draft.view.cluster, self._running, self._jobs, self.outcome.released
        assert running is not None
        tallied: list[tuple[Entry, _Held]] = []
        for index in range(self._last, -1, -1):
            other = running[index]
            if other < entry:
                return None
            if other[2] in gone:
                continue
            held = _held(cluster, jobs[other[2]].desired, kind)
            if held:
                tallied.append((other, held))
                nodes = room.add(held)
                if nodes is not None:
                    return [victim for victim, held in tallied if any(node in nodes for node, _ in held)]
        return None


class _Room:
    """Counts devices that could be freed on each node, until a gang fits."""

    __slots__ = ("_could", "_full", "_kind", "_lacking", "_occupancy", "_size", "_whole_nodes", "_width")

    def __init__(self, occupancy: Occupancy, kind: Kind, width: int, *, whole_nodes: bool) -> None:
        self._occupancy = occupancy
        self._kind = kind
        self._width = width
        self._whole_nodes = whole_nodes
        self._size = occupancy.cluster.node_size[kind]
        self._lacking = width - occupancy.free_devices[kind]
        self._could: dict[int, int] = {}
        self._full: set[int] = set()
        if whole_nodes and width > self._size:
            empty = occupancy.nodes_by_free(kind).get(self._size, 0)
            self._full = {node.id for node in occupancy.cluster.nodes if empty >> node.id & 1}

    def add(self, held: _Held) -> set[int] | None:
        """Count a job's devices; returns the nodes to clear once the gang fits."""
        could, fits = self._could, None
        for node, count in held:
            before = could.get(node)
            if before is None:
                before = _free_on(self._occupancy, self._occupancy.cluster.nodes[node], self._kind)
            could[node] = count = before + count
            self._lacking += before - count
            if count >= self._width:
                fits = node
            if count == self._size:
                self._full.add(node)
        if self._lacking > 0:
            return None
        if not self._whole_nodes:
            return set(could)
        if self._width <= self._size:
            return None if fits is None else {fits}
        return self._several()

    @property
    def short(self) -> int:
        """How many devices must come free at least for the gang to fit."""
        if not self._whole_nodes:
            return max(1, self._lacking)
        free = [
            level for level, mask in self._occupancy.nodes_by_free(self._kind).items() for _ in range(mask.bit_count())
        ]
        could = sorted([*self._could.values(), *free], reverse=True)
        whole = self._width // self._size
        if not whole:
            return max(1, self._width - max(could, default=0))
        return max(1, self._lacking, whole * self._size - sum(could[:whole]))

    def _several(self) -> set[int] | None:
        """Whole nodes, and one more for the rest."""
        whole, rest = divmod(self._width, self._size)
        if len(self._full) < whole:
            return None
        nodes = set(sorted(self._full, key=lambda node: (node in self._could, node))[:whole])
        used = sum(1 << node for node in nodes)
        free = self._occupancy.nodes_by_free(self._kind)
        if not rest or any(level >= rest and mask & ~used for level, mask in free.items()):
            return nodes
        more = next((node for node, could in self._could.items() if could >= rest and node not in nodes), None)
        return None if more is None else {*nodes, more}


def _held(cluster: Cluster, allocation: Allocation | None, kind: Kind) -> _Held:
    """Devices of a type that an allocation has on each node."""
    if allocation is None:
        return ()
    shares = allocation.shares
    if len(shares) == 1:
        run = shares[0].devices
        node, bank = cluster.spot(run.start)
        if run.stop <= bank.devices.stop:
            return ((node.id, len(run)),) if bank.kind == kind else ()
    counts: dict[int, int] = {}
    for device in allocation.devices():
        node, bank = cluster.spot(device)
        if bank.kind == kind:
            counts[node.id] = counts.get(node.id, 0) + 1
    return tuple(counts.items())


def _free_on(occupancy: Occupancy, node: Node, kind: Kind) -> int:
    mask = occupancy.free_mask(node.id)
    if len(node.banks) == 1:
        return mask.bit_count()
    first = node.devices.start
    return sum(
        (mask >> (bank.devices.start - first) & ((1 << len(bank.devices)) - 1)).bit_count()
        for bank in node.banks
        if bank.kind == kind
    )


def arrange(
    draft: Draft, ordered: Sequence[Job], kinds: Kinds, *, rule: PlacementRule = consolidated
) -> PreemptionResult:
    """Reassign all devices by count, in order, each gang on the first of its types that has enough left.

    For clusters of several device types, where moving a running job may be worthwhile. Jobs that keep their type
    keep their devices; jobs to be released are restored if no one needs their devices; the rest goes to the first
    jobs that fit.
    """
    cluster = draft.view.cluster
    dealt = _dealt(draft, ordered, kinds)
    for job, kind in dealt:
        if job.desired is not None and (kind is None or not _held(cluster, job.desired, kind)):
            draft.release(job)
    late: list[Job] = []
    for job, kind in dealt:
        if draft.holding(job) is None and (kind is None or not draft.place(job, kinds=(kind,), rule=rule)):
            late.append(job)
    for job in late:
        if job.desired is None or not draft.restore(job):
            draft.place(job, kinds=kinds(job), rule=rule)
    outcome = PreemptionResult()
    for rank, job in enumerate(ordered):
        held = draft.holding(job)
        if held != job.desired:
            (outcome.released if held is None else outcome.started)[job.id] = (rank, job.seq, job.id)
    return outcome


def _dealt(draft: Draft, ordered: Sequence[Job], kinds: Kinds) -> list[tuple[Job, Kind | None]]:
    """The type each job would get if only device counts mattered."""
    left = dict(draft.view.occupancy.free_devices)
    for job in ordered:
        if job.desired is not None:
            for held, count in draft.view.cluster.groups_of(job.desired):
                left[held] += count
    dealt: list[tuple[Job, Kind | None]] = []
    for job in ordered:
        width = job.spec.devices
        kind: Kind | None = next((kind for kind in kinds(job) if left.get(kind, 0) >= width), None)
        if kind is not None:
            left[kind] -= width
        dealt.append((job, kind))
    return dealt
