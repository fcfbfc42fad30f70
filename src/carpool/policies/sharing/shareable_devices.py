"""Devices with room for another resident, and how jobs start alone or beside others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from carpool.core.draft import Draft
from carpool.core.errors import Overbooked
from carpool.core.model import Allocation, DeviceId, Job, JobId, Kind, Share
from carpool.core.topology import Neighbour, Placement
from carpool.policies.estimator_queries import memory_of

_EPSILON = 1e-9

Likeness = tuple[int, tuple[Kind, ...], str, int, int]


def likeness(job: Job) -> Likeness:
    """Traits that decide where a job fits."""
    spec = job.spec
    return (spec.devices, spec.kinds, spec.model, spec.batch_size, spec.memory_bytes)


class ShareableDevices:
    """Held devices with room for another resident, by the number of residents.

    The first query scans all held devices; afterwards only changed ones are updated.
    """

    __slots__ = ("_draft", "_levels")

    def __init__(self, draft: Draft, most: int) -> None:
        self._draft = draft
        self._levels: list[dict[DeviceId, None]] = [{} for _ in range(most)]  # number of residents -> devices
        for device in draft.occupancy.shared_devices():
            self._file(device)

    def __bool__(self) -> bool:
        return any(self._levels)

    def open_to(self, job: Job, fraction: float = 1.0, *, fullest_first: bool = False) -> Iterator[DeviceId]:
        """Devices that can take the job, fewest residents first."""
        kinds = job.spec.kinds
        cluster = self._draft.view.cluster
        for level in reversed(self._levels) if fullest_first else self._levels:
            for device in level:
                if (not kinds or cluster.kind_of(device) in kinds) and self._fits(job, device, fraction):
                    yield device

    def refile(self, allocation: Allocation) -> None:
        """Update devices that a job has just taken or left."""
        for device in allocation.devices():
            for level in self._levels:
                level.pop(device, None)
            self._file(device)

    def _file(self, device: DeviceId) -> None:
        count = len(self._draft.occupancy.residents(device))
        if 0 < count < len(self._levels):
            self._levels[count][device] = None

    def _fits(self, job: Job, device: DeviceId, fraction: float) -> bool:
        draft = self._draft
        view, residents = draft.view, draft.occupancy.residents(device)
        if sum([resident.fraction for resident in residents]) + fraction > view.policy.max_virtual + _EPSILON:
            return False
        there = view.cluster.bank_of(device).memory_bytes
        if not there:
            return True
        needed = memory_of(view.estimates, job.spec)
        for resident in residents:
            needed += resident.memory_bytes or memory_of(view.estimates, view.jobs[resident.job].spec)
        return needed <= there


def pick_devices(draft: Draft, job: Job, devices: Iterable[DeviceId]) -> tuple[DeviceId, ...] | None:
    """The first offered devices, as many as the job requests: of one type, on one node if possible."""
    width = job.spec.devices
    cluster = draft.view.cluster
    by_bank: dict[int, list[DeviceId]] = {}
    by_kind: dict[Kind, list[DeviceId]] = {}
    for device in devices:
        bank = cluster.bank_of(device)
        found = by_bank.setdefault(bank.devices.start, [])
        found.append(device)
        if len(found) == width:
            return tuple(found)
        by_kind.setdefault(bank.kind, []).append(device)
    return next((tuple(found[:width]) for found in by_kind.values() if len(found) >= width), None)


def fastest_first(draft: Draft, job: Job) -> Sequence[Kind]:
    """Device types the job may use, by estimated rate."""
    kinds = draft.kinds_for(job)
    if len(kinds) < 2:
        return kinds
    rate, width = draft.view.estimates.rate, job.spec.devices
    return sorted(kinds, key=lambda kind: -rate(job.spec, Placement(((kind, width),))).mean)


def start_alone(draft: Draft, job: Job, fraction: float = 1.0, turn: int = 0) -> Allocation | None:
    """Assign free devices of the fastest type that has enough; None if there is none."""
    if draft.num_free < job.spec.devices:
        return None
    for kind in fastest_first(draft, job):
        found = draft.find(job, kinds=(kind,))
        if found is None:
            continue
        shares = tuple([Share(share.devices, fraction, turn) for share in found.shares])
        try:
            draft.assign(job, Allocation(shares))
        except Overbooked:  # its memory does not fit this kind
            continue
        return Allocation(shares)
    return None


def start_jobs(
    draft: Draft, rooms: ShareableDevices, jobs: Iterable[Job], *ways: Callable[[Job], Allocation | None]
) -> tuple[int, ...]:
    """Start jobs in order, each in the first way that works; returns how many were started in each way.

    Stops when there is no room anywhere. Jobs like one that was refused are skipped.
    """
    started = [0] * len(ways)
    refused: set[Likeness] = set()
    for job in jobs:
        if not rooms and not draft.num_free:
            break
        if likeness(job) in refused or draft.holding(job) is not None:
            continue
        for place, way in enumerate(ways):
            if (allocation := way(job)) is not None:
                rooms.refile(allocation)
                started[place] += 1
                break
        else:
            refused.add(likeness(job))
    return tuple(started)


def turns_on(draft: Draft, device: DeviceId, without: JobId | None = None) -> list[int]:
    """The turns of the residents of a device."""
    turns = []
    for resident in draft.occupancy.residents(device):
        held = draft.holding(draft.view.jobs[resident.job])
        if held is not None and resident.job != without:
            turns.append(next(share.turn for share in held.shares if device in share.devices))
    return turns


def placement_with_neighbours(draft: Draft, job: Job, allocation: Allocation) -> Placement:
    """An allocation as a rate model sees it after the draft's changes, with neighbours."""
    view = draft.view
    neighbours: dict[JobId, Neighbour] = {}
    for device in allocation.devices():
        for resident in draft.occupancy.residents(device):
            if resident.job == job.id:
                continue
            other = view.jobs[resident.job]
            held = draft.holding(other)
            assert held is not None
            turn = held.shares[0].turn
            neighbours[other.id] = Neighbour(other.spec, resident.fraction, held.batch_size, turn)
    return replace(view.cluster.placement(allocation), neighbours=tuple(neighbours.values()))


def residents_of(draft: Draft, device: DeviceId) -> list[Job]:
    """The jobs on a device in order of submission."""
    jobs = draft.view.jobs
    return sorted((jobs[r.job] for r in draft.occupancy.residents(device)), key=lambda job: (job.seq, job.id))


class StartedJob(NamedTuple):
    """A started job's allocation, and whether it has its devices to itself."""

    allocation: Allocation
    alone: bool


def admit(
    draft: Draft, rooms: ShareableDevices, jobs: Iterable[Job], join: Callable[[Job], Allocation | None]
) -> Iterator[StartedJob]:
    """Start jobs on free devices, else where `join` puts them; a multi-device job that does not fit blocks others."""
    for job in jobs:
        if not rooms and not draft.num_free:
            return
        allocation = start_alone(draft, job, job.lane[0] if job.lane else 1.0)
        alone = allocation is not None
        if not alone:
            if job.spec.devices > 1:
                return
            allocation = join(job)
        if allocation is not None:
            rooms.refile(allocation)
            yield StartedJob(allocation, alone)


def describe_starts(starts: Sequence[StartedJob]) -> Iterator[str]:
    """How many jobs started, and how; nothing if none did."""
    if starts:
        alone = sum(start.alone for start in starts)
        yield f"started {alone} alone and {len(starts) - alone} beside other jobs"
