"""Driver that runs a policy through a simulation and keeps every record and order."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from carpool.core.job_history import job_history
from carpool.core.messages import (
    Fact,
    ForeignProcess,
    JobCancelled,
    JobPaused,
    JobResumed,
    Observer,
    Order,
    OutsidersSeen,
    Record,
)
from carpool.core.metrics import Metrics, Summary
from carpool.core.model import DeviceId, JobId, Phase
from carpool.core.policy import Policy
from carpool.core.scheduler import Scheduler
from carpool.core.topology import Cluster
from carpool.sim.backend import SimulatedBackend
from carpool.sim.engine import Engine
from carpool.sim.event_queue import ARRIVALS, EventQueue
from carpool.sim.failures import Failures
from carpool.sim.traces.trace import Arrival
from carpool.sim.worlds.base import PlainWorld, World

_ACTIONS: dict[str, Callable[[JobId], Fact]] = {"cancel": JobCancelled, "pause": JobPaused, "resume": JobResumed}


@dataclass(frozen=True, slots=True)
class UserAction:
    """A user's action on a job: cancel, pause or resume."""

    at_s: float
    word: str
    job: str


@dataclass(frozen=True, slots=True)
class UserActions:
    """User actions at given instants; used like `Failures`."""

    actions: Sequence[UserAction]

    def start(self, scheduler: Scheduler, machines: SimulatedBackend, timeline: EventQueue) -> None:
        for action in self.actions:
            timeline.add(action.at_s, ARRIVALS, partial(_say, _ACTIONS[action.word](JobId(action.job))))


@dataclass(frozen=True, slots=True)
class ForeignUse:
    """A foreign process on a device for a while."""

    at_s: float
    until_s: float
    device: int


@dataclass(frozen=True, slots=True)
class ForeignUses:
    """Foreign processes at given instants; used like `Failures`."""

    visits: Sequence[ForeignUse]

    def start(self, scheduler: Scheduler, machines: SimulatedBackend, timeline: EventQueue) -> None:
        for visit in self.visits:
            device = DeviceId(visit.device)
            seen = OutsidersSeen(device, (ForeignProcess(1000 + visit.device, "ada"),))
            timeline.add(visit.at_s, ARRIVALS, partial(_say, seen))
            timeline.add(visit.until_s, ARRIVALS, partial(_say, OutsidersSeen(device)))


def _say(fact: Fact, at: float) -> Fact:
    return fact


@dataclass(frozen=True, slots=True)
class Driven:
    """The result of a run."""

    summary: Summary
    records: list[Record]
    orders: list[tuple[float, Order]]
    scheduler: Scheduler

    def outcome(self, job: str) -> Phase | None:
        return self.scheduler.outcome(JobId(job))

    def story(self, job: str) -> str:
        return "\n".join(
            f"{at:g} s: {words}" for at, words in job_history(self.records, JobId(job), self.scheduler.cluster)
        )


class _RecordingBackend(SimulatedBackend):
    def __init__(
        self, cluster: Cluster, world: World, timeline: EventQueue, *, sharing: bool, report_every_s: float
    ) -> None:
        super().__init__(cluster, world, timeline, sharing=sharing, report_every_s=report_every_s)
        self.orders: list[tuple[float, Order]] = []

    def apply(self, at: float, orders: Sequence[Order]) -> Sequence[Fact]:
        self.orders.extend([(at, order) for order in orders])
        return super().apply(at, orders)


class _RecordKeeper:
    """Keeps records, checks the state after each, and stops a run that does not end."""

    def __init__(self, check: Callable[[Scheduler], None] | None, max_records: int) -> None:
        self.records: list[Record] = []
        self.scheduler: Scheduler | None = None
        self._check = check
        self._max_records = max_records

    def record(self, record: Record) -> None:
        self.records.append(record)
        assert len(self.records) <= self._max_records, f"no end after {self._max_records} records, at {record.at} s"
        broken = sys.exc_info()[0] is not None  # a policy that broke is reported itself
        if self._check is not None and self.scheduler is not None and not broken:
            self._check(self.scheduler)


def drive(
    policy: Policy,
    cluster: Cluster,
    arrivals: Sequence[Arrival],
    world: World | None = None,
    *,
    failures: Sequence[Failures] = (),
    report_every_s: float = 0.0,
    observers: Sequence[Observer] = (),
    check: Callable[[Scheduler], None] | None = None,
    max_records: int = 20_000,
) -> Driven:
    """Run a policy over arrivals to the end, calling `check` after every decision."""
    world = world or PlainWorld()
    metrics, notes, timeline = Metrics(cluster), _RecordKeeper(check, max_records), EventQueue()
    sharing = policy.may_share
    machines = _RecordingBackend(cluster, world, timeline, sharing=sharing, report_every_s=report_every_s)
    scheduler = Scheduler(cluster, policy, estimator=world.estimator(), observers=(metrics, notes, *observers))
    notes.scheduler = scheduler
    Engine(scheduler, machines, timeline, arrivals, failures).run()
    return Driven(metrics.summary(), notes.records, machines.orders, scheduler)
