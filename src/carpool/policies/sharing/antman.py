"""AntMan: guaranteed jobs run at full speed, opportunistic jobs use the idle cycles."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from math import inf
from typing import Any, ClassVar

from carpool.core.draft import Draft
from carpool.core.errors import InputError, Overbooked, UnknownName
from carpool.core.estimates import Estimator
from carpool.core.model import Allocation, DeviceId, Job, Share
from carpool.core.policy import Plan, Policy, Snapshot
from carpool.core.topology import Placement
from carpool.policies.estimator_queries import memory_of
from carpool.policies.registry import register
from carpool.policies.sharing.shareable_devices import (
    Likeness,
    ShareableDevices,
    fastest_first,
    likeness,
    pick_devices,
    placement_with_neighbours,
    start_alone,
    start_jobs,
    turns_on,
)

_WAYS = ("arrival", "weight", "quota")
_OPPORTUNIST = 1  # the lowest turn of a job without a guarantee


@register("antman")
@dataclass(frozen=True, slots=True)
class AntMan(Policy):
    """The lowest turn on a device is its guaranteed job; others queue behind it with higher turns.

    An opportunistic job runs at filler · max(0, 1 − util) · its speed alone, util being the SM use of the jobs
    before it. It joins the devices where that is largest, if its memory fits and at least `min_idle` is idle; it
    moves up when the job before it ends, and moves to free devices when that saves more than `move_s`.

    Guaranteed are: by ``arrival`` jobs that arrive while whole devices are free; by ``weight`` jobs of at least
    `min_weight`; by ``quota`` the jobs of each user that hold at most `quota` devices together. In the last two
    cases a guaranteed job runs ahead of opportunistic ones on their devices, which are requeued if memory does not
    suffice. Without an estimator that knows SM use nothing is shared. After AntMan (OSDI'20); policy re-
    implementation.
    """

    shares_devices: ClassVar[bool] = True
    max_virtual: ClassVar[float] = 16.0  # turns, not fractions, keep residents apart

    guarantee: str = "arrival"
    min_weight: float = 2.0
    quota: int = 1
    most: int = 3  # residents of one device
    min_idle: float = 0.1
    filler: float = 0.9
    move_s: float = 2.0

    def __post_init__(self) -> None:
        if self.guarantee not in _WAYS:
            raise UnknownName("guarantee", self.guarantee, _WAYS)
        if not 1 <= self.most <= self.max_virtual:
            raise InputError(f"most is {self.most}", way_out=f"Give a number from 1 to {self.max_virtual:.0f}.")

    def waiting_key(self, job: Job, estimates: Estimator) -> Any:
        """Guaranteed jobs first if weight decides, else in order of submission."""
        return int(self.guarantee == "weight" and job.spec.weight < self.min_weight)

    def plan(self, view: Snapshot) -> Plan:
        if not view.waiting and not (view.occupancy.is_shared and view.occupancy.num_free):
            return Plan.NOTHING
        draft = Draft(view)
        rooms = ShareableDevices(draft, self.most)
        evicted: list[Job] = []
        guaranteed = self._serve_guaranteed(draft, rooms, evicted)
        moved = self._move_up(draft, rooms)
        first = 0 if self.guarantee == "arrival" else _OPPORTUNIST
        ways = (partial(start_alone, draft, turn=first), partial(self._join, draft, rooms))
        alone, joined = start_jobs(draft, rooms, chain(evicted, draft.waiting()), *ways)
        if not guaranteed + moved + alone + joined:
            return Plan.NOTHING
        return draft.finish(
            f"started {guaranteed + alone} on free devices and {joined} in idle cycles, moved {moved} to free devices"
        )

    def _serve_guaranteed(self, draft: Draft, rooms: ShareableDevices, evicted: list[Job]) -> int:
        served = 0
        refused: set[Likeness] = set()
        for job in self._entitled(draft):
            if likeness(job) in refused:
                continue
            allocation = start_alone(draft, job) or self._go_ahead(draft, rooms, job, evicted)
            if allocation is None:
                refused.add(likeness(job))
            else:
                rooms.refile(allocation)
                served += 1
        return served

    def _entitled(self, draft: Draft) -> Iterator[Job]:
        """Waiting guaranteed jobs, in queue order."""
        view = draft.view
        if self.guarantee == "weight":
            for job in draft.waiting():
                if job.spec.weight < self.min_weight:
                    return
                yield job
        elif self.guarantee == "quota" and view.waiting:
            held: dict[str, int] = {}
            for job in view.running():
                if job.desired is not None and job.desired.shares[0].turn < _OPPORTUNIST:
                    held[job.spec.user] = held.get(job.spec.user, 0) + job.desired.num_devices
            for job in draft.waiting():
                if held.get(job.spec.user, 0) + job.spec.devices <= self.quota:
                    yield job
                    if draft.holding(job) is not None:
                        held[job.spec.user] = held.get(job.spec.user, 0) + job.spec.devices

    def _go_ahead(self, draft: Draft, rooms: ShareableDevices, job: Job, evicted: list[Job]) -> Allocation | None:
        """Take devices that only opportunistic jobs hold; release those whose memory does not fit beside."""
        devices = pick_devices(draft, job, self._yielding(draft, job))
        if devices is None:
            return None
        allocation = Allocation.of(*devices)
        while True:
            try:
                draft.assign(job, allocation)
            except Overbooked:
                last = self._last_resident(draft, devices)
                if last is None:
                    return None
                self._evict(draft, rooms, last, evicted)
            else:
                return allocation

    @staticmethod
    def _yielding(draft: Draft, job: Job) -> Iterator[DeviceId]:
        """Devices that could hold the job and have no guaranteed job."""
        view, kinds = draft.view, job.spec.kinds
        memory = memory_of(view.estimates, job.spec)
        for device in draft.occupancy.shared_devices():
            bank = view.cluster.bank_of(device)
            if (kinds and bank.kind not in kinds) or 0 < bank.memory_bytes < memory:
                continue
            if min(turns_on(draft, device)) >= _OPPORTUNIST:
                yield device

    @staticmethod
    def _evict(draft: Draft, rooms: ShareableDevices, job: Job, evicted: list[Job]) -> None:
        held = draft.holding(job)
        assert held is not None
        draft.release(job)
        rooms.refile(held)
        evicted.append(job)

    @staticmethod
    def _last_resident(draft: Draft, devices: tuple[DeviceId, ...]) -> Job | None:
        residents = {resident.job for device in devices for resident in draft.occupancy.residents(device)}
        return max(
            (draft.view.jobs[job] for job in residents), key=lambda job: (job.submitted_at, job.seq), default=None
        )

    def _join(self, draft: Draft, rooms: ShareableDevices, job: Job) -> Allocation | None:
        """Join the devices with the most idle cycles, weighted by the job's speed there."""
        view = draft.view
        speeds: dict[str, float] = {}
        offers: list[tuple[float, DeviceId]] = []
        for device in rooms.open_to(job):
            kind = view.cluster.kind_of(device)
            residents = [view.jobs[resident.job].spec for resident in draft.occupancy.residents(device)]
            uses = [view.estimates.use(spec, kind) for spec in residents]
            idle = 1.0 - sum([inf if use is None else use.sm for use in uses])
            if idle < self.min_idle:
                continue
            if kind not in speeds:
                speeds[kind] = view.estimates.rate(job.spec, Placement(((kind, job.spec.devices),))).mean
            offers.append((-self.filler * idle * speeds[kind], device))
        devices = pick_devices(draft, job, [device for _, device in sorted(offers)])
        if devices is None:
            return None
        turn = 1 + max([turn for device in devices for turn in turns_on(draft, device)])
        allocation = Allocation.of(*devices, turn=turn)
        draft.assign(job, allocation)
        return allocation

    def _move_up(self, draft: Draft, rooms: ShareableDevices) -> int:
        """Move opportunistic jobs that run behind others to free devices, in order of submission."""
        if not draft.num_free or not draft.occupancy.is_shared:
            return 0
        behind = [job for job in draft.view.running() if self._is_behind(draft, job)]
        return sum([self._moved(draft, rooms, job) for job in sorted(behind, key=lambda job: job.seq)])

    @staticmethod
    def _is_behind(draft: Draft, job: Job) -> bool:
        held = draft.holding(job)
        if held is None:
            return False
        turn = held.shares[0].turn
        return any(min(turns_on(draft, device, job.id), default=turn) < turn for device in held.devices())

    def _moved(self, draft: Draft, rooms: ShareableDevices, job: Job) -> bool:
        """Move a job to free devices if it ends sooner there; it keeps its turn."""
        held, view = draft.holding(job), draft.view
        found = draft.find(job, held.num_devices, kinds=fastest_first(draft, job)) if held is not None else None
        if held is None or found is None:
            return False
        turn = held.shares[0].turn
        there = Allocation(tuple([Share(share.devices, turn=turn) for share in found.shares]))
        now = view.estimates.rate(job.spec, placement_with_neighbours(draft, job, held)).mean
        then = view.estimates.rate(job.spec, view.cluster.placement(there)).mean
        left = view.estimates.remaining(job, view.at).mean
        if then <= 0.0 or (now > 0.0 and left / now <= left / then + self.move_s):
            return False
        try:
            draft.assign(job, there)
        except Overbooked:  # its memory does not fit there
            return False
        rooms.refile(held)
        rooms.refile(there)
        return True
