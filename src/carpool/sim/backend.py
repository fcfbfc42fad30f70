"""Simulated backend: carries out orders at the rates of a world, and reports facts to the scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import inf

from carpool.core.messages import (
    Assign,
    AssignApplied,
    Fact,
    JobCrashed,
    JobFinished,
    Order,
    Probe,
    ProgressReported,
    Release,
    ReleaseApplied,
)
from carpool.core.model import Allocation, DeviceId, JobId, JobSpec
from carpool.core.topology import Cluster, Neighbour, Placement
from carpool.sim.event_queue import MACHINES, EventQueue
from carpool.sim.worlds.base import World

_NEVER_RAN = (0.0, 0)


class RunningJob:
    """One job on its devices: how far it is, how fast it goes, and what will happen to it next."""

    __slots__ = (
        "allocation",
        "done",
        "generation",
        "goal",
        "is_paced",
        "placement",
        "rate",
        "ready_at",
        "since",
        "spec",
        "version",
        "work",
    )

    def __init__(self, spec: JobSpec, work: float, done: float) -> None:
        self.spec = spec
        self.work = work
        self.done = done  # at `since`
        self.since = 0.0
        self.rate = 0.0
        self.is_paced = False  # whether the world has said how fast it goes since it got ready
        self.goal: float | None = None  # work done when its next event is due; None: that event is only a report
        self.generation = 0
        self.allocation: Allocation | None = None
        self.placement: Placement | None = None
        self.ready_at = 0.0  # end of the standstill after the last order
        self.version = 0  # of its next event: older ones were overtaken

    def settle(self, at: float) -> None:
        """Bring `done` up to now."""
        if self.rate:
            self.done = min(self.work, self.done + self.rate * (at - self.since))
        self.since = at


class SimulatedBackend:
    """Carries out orders on a cluster inside a world. Implements the Backend port."""

    def __init__(
        self,
        cluster: Cluster,
        world: World,
        timeline: EventQueue,
        *,
        sharing: bool = False,
        report_every_s: float = 0.0,
    ) -> None:
        self._cluster = cluster
        self._world = world
        self._timeline = timeline
        self._sharing = sharing  # whether devices may have several residents, so that neighbours matter
        self._report_every_s = report_every_s
        self._specs: dict[JobId, JobSpec] = {}
        self._stints: dict[JobId, RunningJob] = {}
        self._away: dict[JobId, tuple[float, int]] = {}  # off their devices: work done, generation of the last order
        self._on_device: dict[int, dict[JobId, RunningJob]] = {}

    def busy(self) -> list[JobId]:
        """Jobs on devices, in order of their start."""
        return list(self._stints)

    def introduce(self, spec: JobSpec) -> None:
        """Make a job known before it can be assigned."""
        self._specs[spec.id] = spec

    # ----------------------------------------------------------------------------------------------- backend port
    def apply(self, at: float, orders: Sequence[Order]) -> Sequence[Fact]:
        """Carry orders out; facts that hold at once."""
        facts: list[Fact] = []
        disturbed: dict[JobId, RunningJob] = {}
        for order in orders:
            if type(order) is Assign:
                self._assign(at, order, facts, disturbed)
            elif type(order) is Release:
                self._release(at, order, facts, disturbed)
        for stint in disturbed.values():
            fact = self._repace(at, stint)
            if fact is not None:
                facts.append(fact)
        for order in orders:
            if type(order) is Assign and isinstance(order.purpose, Probe) and order.job in self._stints:
                facts += self._probed(self._stints[order.job])
        return facts

    def crash(self, at: float, job: JobId, error: str) -> Fact | None:
        """Let a running job crash; None when it is not running."""
        stint = self._stints.get(job)
        if stint is None:
            return None
        disturbed: dict[JobId, RunningJob] = {}
        self._stop(at, stint, disturbed)
        stint.done = self._world.checkpointed(stint.spec, stint.done)
        self._away[job] = stint.done, stint.generation
        for other in disturbed.values():
            self._tell(at, self._repace(at, other))
        return JobCrashed(job, stint.generation, stint.done, error)

    def roll_back(self, at: float, devices: range) -> None:
        """Jobs on lost devices fall back to their last checkpoint; their release will be ordered."""
        for stint in list(self._stints.values()):
            assert stint.allocation is not None
            if any(s.devices.start < devices.stop and devices.start < s.devices.stop for s in stint.allocation.shares):
                stint.settle(at)
                stint.done = self._world.checkpointed(stint.spec, stint.done)
                stint.rate = 0.0
                stint.is_paced = False
                stint.version += 1

    # --------------------------------------------------------------------------------------------------- orders
    def _assign(self, at: float, order: Assign, facts: list[Fact], disturbed: dict[JobId, RunningJob]) -> None:
        job = order.job
        stint = self._stints.get(job)
        spec = self._specs.get(job)
        if spec is None:
            return  # over since: the terminal fact is on its way and wins
        if stint is None:
            before = None
            done, newest = self._away.get(job, _NEVER_RAN)
            if order.generation < newest:
                return  # overtaken on the way
            self._away.pop(job, None)
            stint = RunningJob(spec, self._world.work(spec), done)
            self._stints[job] = stint
        elif order.generation <= stint.generation:
            if order.generation == stint.generation and stint.is_paced:  # said twice: it holds already
                stint.settle(at)
                facts.append(AssignApplied(job, order.generation, stint.done))
            return
        else:
            before = stint.placement
            self._leave(stint, disturbed)
            stint.settle(at)
        moved = stint.allocation is None or not stint.allocation.same_devices(order.allocation)
        stint.allocation = order.allocation
        stint.generation = order.generation
        stint.placement = self._enter(stint, disturbed)
        stint.since = at
        if moved and before is not None and before.groups == stint.placement.groups:
            before = stint.placement  # other devices of the same shape, whatever else changes
        ready_at = at + self._world.change_s(spec, before, stint.placement)
        if not moved:
            ready_at = max(ready_at, stint.ready_at)  # a smaller change does not end a standstill early
        if ready_at > at:
            stint.rate = 0.0
            stint.is_paced = False
            stint.goal = None
            stint.ready_at = ready_at
            self._schedule(stint, ready_at)
            return
        stint.ready_at = at
        facts.append(AssignApplied(job, order.generation, stint.done))
        disturbed[job] = stint

    def _release(self, at: float, order: Release, facts: list[Fact], disturbed: dict[JobId, RunningJob]) -> None:
        stint = self._stints.get(order.job)
        if stint is None:
            done, newest = self._away.get(order.job, _NEVER_RAN)
            if order.job in self._specs and order.generation >= newest:
                self._away[order.job] = done, order.generation
                facts.append(ReleaseApplied(order.job, order.generation, done))
            return
        if order.generation < stint.generation:
            return  # overtaken on the way
        self._stop(at, stint, disturbed)
        self._away[order.job] = stint.done, order.generation
        facts.append(ReleaseApplied(order.job, order.generation, stint.done))

    def _stop(self, at: float, stint: RunningJob, disturbed: dict[JobId, RunningJob]) -> None:
        """Take a job off its devices with its work settled; its pending event is overtaken."""
        stint.settle(at)
        stint.rate = 0.0
        stint.version += 1
        self._leave(stint, disturbed)
        disturbed.pop(stint.spec.id, None)
        del self._stints[stint.spec.id]

    # ---------------------------------------------------------------------------------------------------- events
    def _schedule(self, stint: RunningJob, at: float) -> None:
        stint.version += 1
        self._timeline.add(at, MACHINES, partial(self._reach, stint, stint.version))

    def _tell(self, at: float, fact: Fact | None) -> None:
        """Let a fact follow in the same instant."""
        if fact is not None:
            self._timeline.add(at, MACHINES, lambda _: fact)

    def _reach(self, stint: RunningJob, version: int, at: float) -> Fact | None:
        """A stint's next event is due: it gets ready, changes its pace, reports, or finishes."""
        if version != stint.version:
            return None
        if not stint.is_paced:
            self._repace(at, stint)
            if self._sharing:  # neighbours may have come or gone since the rate was believed
                self._tell(at, self._report(stint))
            return AssignApplied(stint.spec.id, stint.generation, stint.done)
        stint.settle(at)
        if stint.goal is not None and stint.goal > stint.done:
            stint.done = stint.goal  # far from 0 a sum of times may fall short of it by more than any tolerance
        if stint.done >= stint.work:
            return self._finish(at, stint)
        return self._repace(at, stint) or self._report(stint)

    def _finish(self, at: float, stint: RunningJob) -> Fact:
        disturbed: dict[JobId, RunningJob] = {}
        self._stop(at, stint, disturbed)
        del self._specs[stint.spec.id]
        for other in disturbed.values():
            self._tell(at, self._repace(at, other))
        return JobFinished(stint.spec.id, stint.generation)

    def _repace(self, at: float, stint: RunningJob) -> Fact | None:
        """Set the rate from the world and schedule what comes next; a report when a running job's rate has changed."""
        stint.settle(at)
        if stint.ready_at > at:
            return None
        if self._sharing:
            stint.placement = self._describe(stint)
        assert stint.placement is not None
        pace = self._world.pace(stint.spec, stint.done, stint.placement)
        changed = stint.is_paced and stint.rate != pace.rate
        stint.is_paced = True
        stint.rate = pace.rate
        stint.goal = stint.work if stint.work < pace.until else pace.until
        left = stint.goal - stint.done
        next_s = inf if left > 0.0 else 0.0
        if pace.rate > 0.0 and left > 0.0:
            next_s = left / pace.rate
        if 0.0 < self._report_every_s < next_s:
            next_s = self._report_every_s
            stint.goal = None
        if next_s < inf:
            self._schedule(stint, at + next_s)
        else:
            stint.version += 1  # nothing will happen by itself: what was expected before is off
        return self._report(stint) if changed else None

    def _report(self, stint: RunningJob) -> Fact:
        assert stint.placement is not None
        signs = self._world.signals(stint.spec, stint.done, stint.placement)
        return ProgressReported(stint.spec.id, stint.generation, stint.done, stint.rate, *signs)

    def _probed(self, stint: RunningJob) -> list[Fact]:
        """What a probe measures while the neighbours stand still, and the rate beside them; it takes no time here."""
        if not stint.is_paced or stint.placement is None:
            return []  # it is not there yet, and is not measured
        quiet = replace(stint.placement, neighbours=(), beside=0.0)
        rate = self._world.pace(stint.spec, stint.done, quiet).rate
        return [
            ProgressReported(stint.spec.id, stint.generation, stint.done, rate, alone=True),
            self._report(stint),
        ]

    # ------------------------------------------------------------------------------------------------ neighbours
    def _enter(self, stint: RunningJob, disturbed: dict[JobId, RunningJob]) -> Placement:
        assert stint.allocation is not None
        if self._sharing:
            for device in stint.allocation.devices():
                beside = self._on_device.setdefault(device, {})
                disturbed.update(beside)
                beside[stint.spec.id] = stint
        return self._describe(stint)

    def _leave(self, stint: RunningJob, disturbed: dict[JobId, RunningJob]) -> None:
        if not self._sharing:
            return
        assert stint.allocation is not None
        for device in stint.allocation.devices():
            beside = self._on_device[device]
            del beside[stint.spec.id]
            disturbed.update(beside)

    def _describe(self, stint: RunningJob) -> Placement:
        allocation = stint.allocation
        assert allocation is not None
        alone = self._cluster.placement(allocation)
        if not self._sharing:
            return alone
        own = stint.spec.id
        return alone.among(
            [
                {job: _neighbour(other, device) for job, other in self._on_device[device].items() if job != own}
                for device in allocation.devices()
            ]
        )


def _neighbour(stint: RunningJob, device: DeviceId) -> Neighbour:
    assert stint.allocation is not None
    assert stint.placement is not None
    shares = stint.allocation.shares
    share = shares[0] if len(shares) == 1 else next(share for share in shares if device in share.devices)
    return Neighbour(stint.spec, share.fraction, stint.allocation.batch_size, share.turn, stint.placement.groups)
