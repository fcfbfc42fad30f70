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
    """A job on its devices: progress, rate, and its next event."""

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
        self.is_paced = False  # whether it has been given a rate since it became ready
        self.goal: float | None = None  # work done when its next event is due; None: that event is only a report
        self.generation = 0
        self.allocation: Allocation | None = None
        self.placement: Placement | None = None
        self.ready_at = 0.0  # end of the stall after the last order
        self.version = 0  # of its next event; older ones are void

    def settle(self, at: float) -> None:
        if self.rate:
            self.done = min(self.work, self.done + self.rate * (at - self.since))
        self.since = at


class SimulatedBackend:
    """Executes orders on a cluster inside a world."""

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
        self._sharing = sharing  # whether devices may have several residents
        self._report_every_s = report_every_s
        self._specs: dict[JobId, JobSpec] = {}
        self._running: dict[JobId, RunningJob] = {}
        self._released: dict[JobId, tuple[float, int]] = {}  # without devices: work done, generation of the last order
        self._on_device: dict[int, dict[JobId, RunningJob]] = {}

    def busy(self) -> list[JobId]:
        """Running jobs, in order of their start."""
        return list(self._running)

    def introduce(self, spec: JobSpec) -> None:
        """Register a job before it can be assigned."""
        self._specs[spec.id] = spec

    def apply(self, at: float, orders: Sequence[Order]) -> Sequence[Fact]:
        facts: list[Fact] = []
        disturbed: dict[JobId, RunningJob] = {}
        for order in orders:
            if type(order) is Assign:
                self._assign(at, order, facts, disturbed)
            elif type(order) is Release:
                self._release(at, order, facts, disturbed)
        for running in disturbed.values():
            fact = self._repace(at, running)
            if fact is not None:
                facts.append(fact)
        for order in orders:
            if type(order) is Assign and isinstance(order.purpose, Probe) and order.job in self._running:
                facts += self._probed(self._running[order.job])
        return facts

    def crash(self, at: float, job: JobId, error: str) -> Fact | None:
        """Crash a running job; None when it is not running."""
        running = self._running.get(job)
        if running is None:
            return None
        disturbed: dict[JobId, RunningJob] = {}
        self._stop(at, running, disturbed)
        running.done = self._world.checkpointed(running.spec, running.done)
        self._released[job] = running.done, running.generation
        for other in disturbed.values():
            self._emit(at, self._repace(at, other))
        return JobCrashed(job, running.generation, running.done, error)

    def roll_back(self, at: float, devices: range) -> None:
        """Reset jobs on lost devices to their last checkpoint; the scheduler will order their release."""
        for running in list(self._running.values()):
            assert running.allocation is not None
            if any(
                s.devices.start < devices.stop and devices.start < s.devices.stop for s in running.allocation.shares
            ):
                running.settle(at)
                running.done = self._world.checkpointed(running.spec, running.done)
                running.rate = 0.0
                running.is_paced = False
                running.version += 1

    def _assign(self, at: float, order: Assign, facts: list[Fact], disturbed: dict[JobId, RunningJob]) -> None:
        job = order.job
        running = self._running.get(job)
        spec = self._specs.get(job)
        if spec is None:
            return  # already over: its terminal fact wins
        if running is None:
            before = None
            done, newest = self._released.get(job, _NEVER_RAN)
            if order.generation < newest:
                return  # outdated
            self._released.pop(job, None)
            running = RunningJob(spec, self._world.work(spec), done)
            self._running[job] = running
        elif order.generation <= running.generation:
            if order.generation == running.generation and running.is_paced:  # repeated: already applied
                running.settle(at)
                facts.append(AssignApplied(job, order.generation, running.done))
            return
        elif isinstance(order.purpose, Probe) and running.is_paced and order.allocation == running.allocation:
            running.settle(at)
            running.generation = order.generation
            facts.append(AssignApplied(job, order.generation, running.done))
            return
        else:
            before = running.placement
            self._leave(running, disturbed)
            running.settle(at)
        moved = running.allocation is None or not running.allocation.same_devices(order.allocation)
        running.allocation = order.allocation
        running.generation = order.generation
        running.placement = self._enter(running, disturbed)
        running.since = at
        if moved and before is not None and before.groups == running.placement.groups:
            before = running.placement  # the job moves to other devices of the same shape, whatever else changes
        ready_at = at + self._world.change_s(spec, before, running.placement)
        if not moved:
            ready_at = max(ready_at, running.ready_at)  # a smaller change must not end a stall early
        if ready_at > at:
            running.rate = 0.0
            running.is_paced = False
            running.goal = None
            running.ready_at = ready_at
            self._schedule(running, ready_at)
            return
        running.ready_at = at
        facts.append(AssignApplied(job, order.generation, running.done))
        disturbed[job] = running

    def _release(self, at: float, order: Release, facts: list[Fact], disturbed: dict[JobId, RunningJob]) -> None:
        running = self._running.get(order.job)
        if running is None:
            done, newest = self._released.get(order.job, _NEVER_RAN)
            if order.job in self._specs and order.generation >= newest:
                self._released[order.job] = done, order.generation
                facts.append(ReleaseApplied(order.job, order.generation, done))
            return
        if order.generation < running.generation:
            return  # outdated
        self._stop(at, running, disturbed)
        self._released[order.job] = running.done, order.generation
        facts.append(ReleaseApplied(order.job, order.generation, running.done))

    def _stop(self, at: float, running: RunningJob, disturbed: dict[JobId, RunningJob]) -> None:
        """Take a job off its devices; its pending event becomes void."""
        running.settle(at)
        running.rate = 0.0
        running.version += 1
        self._leave(running, disturbed)
        disturbed.pop(running.spec.id, None)
        del self._running[running.spec.id]

    def _schedule(self, running: RunningJob, at: float) -> None:
        running.version += 1
        self._timeline.add(at, MACHINES, partial(self._reach, running, running.version))

    def _emit(self, at: float, fact: Fact | None) -> None:
        if fact is not None:
            self._timeline.add(at, MACHINES, lambda _: fact)

    def _reach(self, running: RunningJob, version: int, at: float) -> Fact | None:
        """Handle a job's next event: ready, new rate, report, or finish."""
        if version != running.version:
            return None
        if not running.is_paced:
            self._repace(at, running)
            if self._sharing:  # neighbours may have changed since the estimate
                self._emit(at, self._report(running))
            return AssignApplied(running.spec.id, running.generation, running.done)
        running.settle(at)
        if running.goal is not None and running.goal > running.done:
            running.done = running.goal  # a sum of large times may be rounded to less
        if running.done >= running.work:
            return self._finish(at, running)
        return self._repace(at, running) or self._report(running)

    def _finish(self, at: float, running: RunningJob) -> Fact:
        disturbed: dict[JobId, RunningJob] = {}
        self._stop(at, running, disturbed)
        del self._specs[running.spec.id]
        for other in disturbed.values():
            self._emit(at, self._repace(at, other))
        return JobFinished(running.spec.id, running.generation)

    def _repace(self, at: float, running: RunningJob) -> Fact | None:
        """Set the rate from the world and schedule the next event; returns a report if the rate changed."""
        running.settle(at)
        if running.ready_at > at:
            return None
        if self._sharing:
            running.placement = self._describe(running)
        assert running.placement is not None
        pace = self._world.pace(running.spec, running.done, running.placement)
        changed = running.is_paced and running.rate != pace.rate
        running.is_paced = True
        running.rate = pace.rate
        running.goal = running.work if running.work < pace.until else pace.until
        left = running.goal - running.done
        next_s = inf if left > 0.0 else 0.0
        if pace.rate > 0.0 and left > 0.0:
            next_s = left / pace.rate
        if 0.0 < self._report_every_s < next_s:
            next_s = self._report_every_s
            running.goal = None
        if next_s < inf:
            self._schedule(running, at + next_s)
        else:
            running.version += 1  # no next event: void the pending one
        return self._report(running) if changed else None

    def _report(self, running: RunningJob) -> Fact:
        assert running.placement is not None
        signals = self._world.signals(running.spec, running.done, running.placement)
        return ProgressReported(running.spec.id, running.generation, running.done, running.rate, *signals)

    def _probed(self, running: RunningJob) -> list[Fact]:
        """The rate measured alone by a probe, and the shared rate; takes no simulated time."""
        if not running.is_paced or running.placement is None:
            return []  # not started yet
        quiet = replace(running.placement, neighbours=(), beside=0.0)
        rate = self._world.pace(running.spec, running.done, quiet).rate
        return [
            ProgressReported(running.spec.id, running.generation, running.done, rate, alone=True),
            self._report(running),
        ]

    def _enter(self, running: RunningJob, disturbed: dict[JobId, RunningJob]) -> Placement:
        assert running.allocation is not None
        if self._sharing:
            for device in running.allocation.devices():
                beside = self._on_device.setdefault(device, {})
                disturbed.update(beside)
                beside[running.spec.id] = running
        return self._describe(running)

    def _leave(self, running: RunningJob, disturbed: dict[JobId, RunningJob]) -> None:
        if not self._sharing:
            return
        assert running.allocation is not None
        for device in running.allocation.devices():
            beside = self._on_device[device]
            del beside[running.spec.id]
            disturbed.update(beside)

    def _describe(self, running: RunningJob) -> Placement:
        allocation = running.allocation
        assert allocation is not None
        alone = self._cluster.placement(allocation)
        if not self._sharing:
            return alone
        own = running.spec.id
        return alone.among(
            [
                {job: _neighbour(other, device) for job, other in self._on_device[device].items() if job != own}
                for device in allocation.devices()
            ]
        )


def _neighbour(running: RunningJob, device: DeviceId) -> Neighbour:
    assert running.allocation is not None
    assert running.placement is not None
    shares = running.allocation.shares
    share = shares[0] if len(shares) == 1 else next(share for share in shares if device in share.devices)
    return Neighbour(running.spec, share.fraction, running.allocation.batch_size, share.turn, running.placement.groups)
