"""Plan draft: tries allocation changes on a private copy of the occupancy and records them as a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from heapq import merge
from math import inf

from carpool.core.errors import OutOfHostResources, Overbooked
from carpool.core.messages import RUN, Change, Probe, Run
from carpool.core.model import Allocation, Job, JobId, Kind
from carpool.core.occupancy import Occupancy
from carpool.core.placement import PlacementRule, Runs, consolidated, emptiest, place
from carpool.core.policy import Plan, Snapshot
from carpool.core.queue import Demand, demand_of


class Draft:
    """Starts from what holds, records changes, refuses overbooking, keeps a job where it is when nothing is gained."""

    __slots__ = ("_changes", "_free", "_refused", "view")

    def __init__(self, view: Snapshot) -> None:
        self.view = view
        self._free: Occupancy | None = None
        self._changes: dict[JobId, Change] = {}
        self._refused: set[Demand] = set()

    @property
    def occupancy(self) -> Occupancy:
        """Devices as they would stand after the changes so far."""
        return self.view.occupancy if self._free is None else self._free

    @property
    def num_free(self) -> int:
        """Free devices of all kinds after the changes so far."""
        return self.occupancy.num_free

    @property
    def changes(self) -> Mapping[JobId, Change]:
        """What differs so far from what holds."""
        return self._changes

    def holding(self, job: Job) -> Allocation | None:
        """What a job would hold after the changes so far."""
        change = self._changes.get(job.id)
        return job.desired if change is None else change.allocation

    def waiting(self) -> Iterator[Job]:
        """Waiting jobs in queue order, leaving out those whose like did not fit before."""
        jobs = self.view.jobs
        for entry in self.view.waiting.entries(self._refused):
            yield jobs[entry[2]]

    def in_order(self) -> Iterator[Job]:
        """Waiting and running jobs together, both in the policy's key order (keys must be comparable)."""
        jobs = self.view.jobs
        for _, _, job in merge(self.view.waiting.entries(self._refused), self.view.roster.entries()):
            yield jobs[job]

    def kinds_for(self, job: Job) -> Sequence[Kind]:
        """Kinds the job may run on and that have the memory it needs: in its own order, else in the cluster's."""
        return self.view.kinds_for(job)

    def find(
        self,
        job: Job,
        count: int = 0,
        *,
        kinds: Sequence[Kind] = (),
        rule: PlacementRule = consolidated,
        batch_size: int = 0,
    ) -> Allocation | None:
        """Free devices for the job (as many as it asks for, unless `count` says otherwise), or None."""
        if len(job.lane) > 1:
            return None  # unlike shares: only whoever gave them out can do it again
        allowed = self.kinds_for(job)
        kinds = [kind for kind in kinds if kind in allowed] if kinds else allowed
        count = count or job.spec.devices
        runs = self._supplied(job, kinds, count, rule) if job.spec.asks_supplies else None
        # Devices without supplies are named all the same: whoever assigns them is told what is short.
        runs = runs or place(self.occupancy, kinds, count, rule)
        return None if runs is None else Allocation.exclusive(runs, batch_size)

    def _supplied(self, job: Job, kinds: Sequence[Kind], count: int, rule: PlacementRule) -> Runs | None:
        """Free devices on nodes that have the supplies for them: by the rule, or on any nodes at all."""
        offered = self.occupancy.offered(job.spec)
        return place(offered, kinds, count, rule) or place(offered, kinds, count, emptiest)

    def place(
        self,
        job: Job,
        count: int = 0,
        *,
        kinds: Sequence[Kind] = (),
        rule: PlacementRule = consolidated,
        batch_size: int = 0,
    ) -> bool:
        """Find free devices and assign them; remembers demands that did not fit."""
        allocation = self.find(job, count, kinds=kinds, rule=rule, batch_size=batch_size)
        if allocation is None:
            if not (count or kinds or job.spec.memory_bytes or len(job.lane) > 1):
                self._refused.add(demand_of(job))  # of which neither memory nor shares are a part
            return False
        self.assign(job, allocation)
        return True

    def fill(self, rule: PlacementRule = consolidated, *, bypass: bool = True) -> int:
        """Start waiting jobs in queue order on the devices they ask for; how many.

        The first that does not fit ends it, unless `bypass` lets later ones pass.
        """
        view = self.view
        jobs, changes, refused = view.jobs, self._changes, self._refused
        kinds = view.cluster.kinds
        free = self.occupancy
        started = 0
        for _, _, job_id in view.waiting.entries(refused):
            job = jobs[job_id]
            spec = job.spec
            if job_id in changes or len(job.lane) > 1:
                continue
            allowed = self.kinds_for(job) if spec.memory_bytes else spec.kinds or kinds
            asks = spec.cpus or spec.ram_bytes or spec.disk_bytes  # `asks_supplies`, where a call is felt
            if asks:
                runs = self._supplied(job, allowed, spec.devices, rule)
            else:
                runs = place(free, allowed, spec.devices, rule)
            if runs is not None:
                allocation = _in_lane(job, Allocation.exclusive(runs))
                free = self._fork()
                free.take(spec, allocation)
                changes[job_id] = Change(job_id, allocation)
                started += 1
            elif bypass:
                if not spec.memory_bytes and not asks:  # which are no part of a demand
                    refused.add(view.waiting.demand(job_id))
            else:
                break
        return started

    def assign(self, job: Job, allocation: Allocation, purpose: Run | Probe = RUN) -> None:
        """Let a job hold an allocation; Overbooked, with nothing changed, when it cannot."""
        held = self.holding(job)
        allocation = _in_lane(job, allocation)
        if allocation == held and purpose == RUN:
            return
        job.check_lane(allocation)
        free = self._fork()
        if held is not None:
            free.give(job.id, held)
            self._refused.clear()
        try:
            free.take(job.spec, allocation, self.view.policy.max_virtual)
        except Overbooked as error:
            if held is not None:
                free.take(job.spec, held, inf)  # whoever allowed it, it was allowed
            if isinstance(error, OutOfHostResources):
                error.draft = self
            raise
        if allocation == job.desired and purpose == RUN:
            self._changes.pop(job.id, None)
        else:
            self._changes[job.id] = Change(job.id, allocation, purpose)

    def release(self, job: Job) -> None:
        """Take a job off its devices."""
        held = self.holding(job)
        if held is None:
            return
        self._fork().give(job.id, held)
        self._refused.clear()
        if job.desired is None:
            del self._changes[job.id]
        else:
            self._changes[job.id] = Change(job.id, None)

    def restore(self, job: Job) -> bool:
        """Give a job back what it really holds; whether that is still to be had."""
        if job.desired is None:
            self.release(job)
            return True
        try:
            self.assign(job, job.desired)
        except Overbooked:
            return False
        return True

    def finish(self, reason: str, *, wake_at: float | None = None, note: object = None) -> Plan:
        """The plan: releases first, then assignments, each in the order they were made."""
        changes = tuple(
            sorted(self._changes.values(), key=_is_assignment) if len(self._changes) > 1 else self._changes.values()
        )
        return Plan(changes, reason, wake_at, note, self._free)

    def _fork(self) -> Occupancy:
        if self._free is None:
            self._free = self.view.occupancy.fork()
        return self._free


def _in_lane(job: Job, allocation: Allocation) -> Allocation:
    """Whole devices at the share that an exact job keeps for life: it has them to itself all the same."""
    if len(job.lane) != 1 or job.lane == (1.0,) or allocation.fractions != (1.0,):
        return allocation
    return allocation._replace(shares=tuple([share._replace(fraction=job.lane[0]) for share in allocation.shares]))


def _is_assignment(change: Change) -> bool:
    return change.allocation is not None
