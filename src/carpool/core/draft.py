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
    """A plan in the making: records changes to the current allocations and rejects overbooking at once."""

    __slots__ = ("_changes", "_free", "_refused", "view")

    def __init__(self, view: Snapshot) -> None:
        self.view = view
        self._free: Occupancy | None = None
        self._changes: dict[JobId, Change] = {}
        self._refused: set[Demand] = set()

    @property
    def occupancy(self) -> Occupancy:
        return self.view.occupancy if self._free is None else self._free

    @property
    def num_free(self) -> int:
        return self.occupancy.num_free

    @property
    def changes(self) -> Mapping[JobId, Change]:
        return self._changes

    def holding(self, job: Job) -> Allocation | None:
        change = self._changes.get(job.id)
        return job.desired if change is None else change.allocation

    def waiting(self) -> Iterator[Job]:
        """Waiting jobs in queue order, without those whose demand did not fit before."""
        jobs = self.view.jobs
        for entry in self.view.waiting.entries(self._refused):
            yield jobs[entry[2]]

    def in_order(self) -> Iterator[Job]:
        """Waiting and running jobs together, both in the policy's key order (keys must be comparable)."""
        jobs = self.view.jobs
        for _, _, job in merge(self.view.waiting.entries(self._refused), self.view.running_jobs.entries()):
            yield jobs[job]

    def kinds_for(self, job: Job) -> Sequence[Kind]:
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
            return None  # different shares per device: only the policy that chose them can repeat them
        allowed = self.kinds_for(job)
        kinds = [kind for kind in kinds if kind in allowed] if kinds else allowed
        count = count or job.spec.devices
        runs = self._find_within_resources(job, kinds, count, rule) if job.spec.needs_host_resources else None
        # If host resources are short, return devices anyway: assigning them raises the error that names the shortage.
        runs = runs or place(self.occupancy, kinds, count, rule, self.view.cluster.nodes_for(job.spec))
        return None if runs is None else Allocation.exclusive(runs, batch_size)

    def _find_within_resources(self, job: Job, kinds: Sequence[Kind], count: int, rule: PlacementRule) -> Runs | None:
        """Free devices on nodes with enough host resources: by the rule, else on any nodes."""
        offered = self.occupancy.within_resources(job.spec)
        most = self.view.cluster.nodes_for(job.spec)
        return place(offered, kinds, count, rule, most) or place(offered, kinds, count, emptiest, most)

    def place(
        self,
        job: Job,
        count: int = 0,
        *,
        kinds: Sequence[Kind] = (),
        rule: PlacementRule = consolidated,
        batch_size: int = 0,
    ) -> bool:
        """Find free devices and assign them; demands that do not fit are remembered."""
        allocation = self.find(job, count, kinds=kinds, rule=rule, batch_size=batch_size)
        if allocation is None:
            if not (count or kinds or job.spec.memory_bytes or len(job.lane) > 1):
                self._refused.add(demand_of(job))  # neither memory nor shares are part of a demand
            return False
        self.assign(job, allocation)
        return True

    def fill(self, rule: PlacementRule = consolidated, *, bypass: bool = True) -> int:
        """Start waiting jobs in queue order on the devices they ask for; returns how many.

        Without `bypass`, the first job that does not fit blocks those behind it.
        """
        view = self.view
        jobs, changes, refused = view.jobs, self._changes, self._refused
        kinds, usual_nodes = view.cluster.kinds, view.cluster.max_nodes
        free = self.occupancy
        started = 0
        for _, _, job_id in view.waiting.entries(refused):
            job = jobs[job_id]
            spec = job.spec
            if job_id in changes or len(job.lane) > 1:
                continue
            allowed = self.kinds_for(job) if spec.memory_bytes else spec.kinds or kinds
            asks = spec.cpus or spec.ram_bytes or spec.disk_bytes  # `needs_host_resources`, inlined: hot
            if asks:
                runs = self._find_within_resources(job, allowed, spec.devices, rule)
            else:
                runs = place(free, allowed, spec.devices, rule, usual_nodes and (spec.max_nodes or usual_nodes))
            if runs is not None:
                allocation = _in_lane(job, Allocation.exclusive(runs))
                free = self._fork()
                free.take(spec, allocation)
                changes[job_id] = Change(job_id, allocation)
                started += 1
            elif bypass:
                if not spec.memory_bytes and not asks:  # neither is part of a demand
                    refused.add(view.waiting.demand(job_id))
            else:
                break
        return started

    def assign(self, job: Job, allocation: Allocation, purpose: Run | Probe = RUN) -> None:
        """Assign an allocation; raises Overbooked, with nothing changed, when it does not fit."""
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
                free.take(job.spec, held, inf)  # it was allowed before
            if isinstance(error, OutOfHostResources):
                error.draft = self
            raise
        if allocation == job.desired and purpose == RUN:
            self._changes.pop(job.id, None)
        else:
            self._changes[job.id] = Change(job.id, allocation, purpose)

    def release(self, job: Job) -> None:
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
        """Undo a job's changes; False if other changes have taken its devices."""
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
            sorted(self._changes.values(), key=lambda change: change.allocation is not None)
            if len(self._changes) > 1
            else self._changes.values()
        )
        return Plan(changes, reason, wake_at, note, self._free)

    def _fork(self) -> Occupancy:
        if self._free is None:
            self._free = self.view.occupancy.fork()
        return self._free


def _in_lane(job: Job, allocation: Allocation) -> Allocation:
    """Whole devices at the share that an exact job keeps for life."""
    if len(job.lane) != 1 or job.lane == (1.0,) or allocation.fractions != (1.0,):
        return allocation
    return allocation._replace(shares=tuple([share._replace(fraction=job.lane[0]) for share in allocation.shares]))
