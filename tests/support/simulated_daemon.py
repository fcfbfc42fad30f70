"""A daemon over the simulated backend: its past is simulated at once, its present in real time."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from math import exp, inf, sin
from pathlib import Path
from typing import Any
from zlib import crc32

from carpool.backends.executors import LOCAL, ExecutorGroup
from carpool.backends.job_accounting import JobAccounting
from carpool.core.estimates import Estimator
from carpool.core.journal import Header
from carpool.core.messages import Fact, JobSubmitted, Order, ProgressReported, Record, Woke
from carpool.core.model import JobId, JobSpec
from carpool.core.policy import Policy
from carpool.core.scheduler import Scheduler
from carpool.core.topology import Cluster, Placement
from carpool.jobs.program import Program
from carpool.policies.registry import parse_policy
from carpool.runtime.executor.job_folder import JobFolder
from carpool.runtime.executor.reports import Facts, Gone, Report
from carpool.service.daemon.group_commit import commit_inline
from carpool.service.daemon.loop import DaemonLoop, LoopHooks, LoopOptions
from carpool.service.daemon.read_model import ReadModel
from carpool.service.queries.allocation_history import AllocationHistory
from carpool.service.queries.event_log import EventFeed, EventLog
from carpool.service.queries.present import TimeBase
from carpool.service.service import SchedulerService
from carpool.service.store.store import Store
from carpool.sim.backend import SimulatedBackend
from carpool.sim.event_queue import ARRIVALS, EventQueue
from carpool.sim.traces.trace import Arrival
from carpool.sim.worlds.base import Pace, PlainWorld, TrainingSignals, World
from tests.support.daemon_task import at_work


@dataclass(frozen=True, slots=True)
class DemoWorld(World):
    """The plain world with trainings that have a loss and a rate per device."""

    plain: PlainWorld = field(default_factory=PlainWorld)
    steps_per_s: Mapping[str, float] = field(default_factory=dict)  # by model; 1 where none is given

    def prepare(self, arrivals: Sequence[Arrival], cluster: Cluster) -> tuple[Sequence[Arrival], Cluster]:
        """Everything as it is."""
        return arrivals, cluster

    def work(self, spec: JobSpec) -> float:
        """What was declared, or a thousand steps."""
        return 1000.0 if spec.work is None else spec.work

    def pace(self, spec: JobSpec, done: float, placement: Placement) -> Pace:
        """In proportion to devices and shares."""
        return Pace(self.plain.pace(spec, done, placement).rate * self.steps_per_s.get(spec.model, 1.0))

    def change_s(self, spec: JobSpec, before: Placement | None, after: Placement) -> float:
        """As in the plain world."""
        return self.plain.change_s(spec, before, after)

    def signals(self, spec: JobSpec, done: float, placement: Placement) -> TrainingSignals:
        """A loss that falls and trembles: 0.2 + 2.1·e^(−5·done/work), by three per cent up and down."""
        part = done / max(1.0, self.work(spec))
        seed = crc32(spec.id.encode())
        tremble = 0.03 * sin(97.0 * part + seed) + 0.02 * sin(431.0 * part + seed % 7)
        return TrainingSignals(loss=(0.2 + seed % 9 / 30 + 2.1 * exp(-5.0 * part)) * (1.0 + tremble))

    def checkpointed(self, spec: JobSpec, done: float) -> float:
        """Nothing is lost."""
        return self.plain.checkpointed(spec, done)

    def estimator(self) -> Estimator:
        """What was declared."""
        return self.plain.estimator()


class SimulatedExecutor:
    """The simulated backend as an executor and a clock; the past is simulated first.

    Implements `ExecutorPort` and `WaitableClock`, and observes the scheduler to learn of jobs.
    """

    def __init__(self, cluster: Cluster, world: DemoWorld, *, speed: float = 1.0, report_every_s: float = 1.0) -> None:
        self.life = 1  # it is always the same executor
        self.heard = 0  # number of the last report received
        self._timeline = EventQueue()
        self._machines = SimulatedBackend(cluster, world, self._timeline, sharing=True, report_every_s=report_every_s)
        self._speed = speed
        self._live_from = 0.0
        self._began = time.monotonic()  # at `live_from`
        self._queue: asyncio.Queue[Report] = asyncio.Queue()

    def record(self, record: Record) -> None:
        """Learn of jobs."""
        for fact in record.facts:
            if isinstance(fact, JobSubmitted):
                self._machines.introduce(fact.spec)

    def arrive(self, arrivals: Iterable[Arrival]) -> None:
        """Submit jobs at their times."""
        for at, spec in arrivals:
            self._timeline.add(at, ARRIVALS, partial(_submitted, spec))

    def live_through(self, scheduler: Scheduler, until: float, take: Callable[[float, Report], None]) -> None:
        """Simulate up to an instant, which is now."""
        while True:
            at = min(_or_never(self._timeline.next_at), _or_never(scheduler.wake_at))
            if at > until:
                break
            facts: Sequence[Fact] = self._timeline.happen(at)
            if not facts and at == scheduler.wake_at:
                facts = (Woke(),)
            while facts:
                orders = scheduler.handle(at, facts)
                take(at, Facts(tuple(facts)))
                facts = self._machines.apply(at, orders)
        self._live_from, self._began = until, time.monotonic()

    # ---------------------------------------------------------------------------------------------------- as a link
    def introduce(self, job: JobId, program: Program, *, resume: bool = False) -> None:
        """Known already."""

    def carry(self, orders: Sequence[Order]) -> None:
        """Carry orders out."""
        self._say(self._machines.apply(self.now(), orders))

    async def receive(self) -> Report:
        """The next report."""
        report = await self._queue.get()
        self.heard += 1
        return report

    def acknowledge(self, number: int) -> None:
        """Nothing is said twice anyway."""

    def proceed(self) -> None:
        """Nobody stands still."""

    def forget(self, job: JobId) -> None:
        """Nothing is remembered of those who are over."""

    def hand_over(self, job: JobId) -> None:
        """There is no other executor."""

    async def leave(self) -> None:
        """Nobody will claim it."""

    async def stop(self, *, checkpoint: bool) -> None:
        """Nothing has to be kept."""
        self._queue.put_nowait(Gone("it was told to stop"))

    # --------------------------------------------------------------------------------------------------- as a clock
    def now(self) -> float:
        """Seconds since the beginning."""
        return self._live_from + (time.monotonic() - self._began) * self._speed

    async def wait(self, tasks: set[asyncio.Task[Any]], until: float | None) -> None:
        """Return when one of the tasks is done, when it is time, or when something happens."""
        following = min(_or_never(until), _or_never(self._timeline.next_at))
        timeout = None if following == inf else max(0.0, following - self.now()) / self._speed
        await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        self._say(self._timeline.happen(self.now()))

    def _say(self, facts: Sequence[Fact]) -> None:
        if facts:
            self._queue.put_nowait(Facts(tuple(facts)))


class Papers:
    """Writes the log and the loss curve that trainings would leave."""

    def __init__(self, state: Path) -> None:
        self._state = state
        self._lines: dict[JobId, list[str]] = {}

    def hear(self, at: float, report: Report) -> None:
        """Note what a training reports."""
        if isinstance(report, Facts):
            for fact in report.facts:
                if isinstance(fact, ProgressReported):
                    row = {"at_s": at, "step": int(fact.done), "loss": fact.loss, "steps_per_s": fact.rate}
                    self._lines.setdefault(fact.job, []).append(json.dumps(row) + "\n")

    def write(self) -> None:
        """Write what was noted since the last time."""
        for job, lines in self._lines.items():
            folder = JobFolder(self._state, job).path
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
                file.writelines(lines)
            with (folder / "log").open("a", encoding="utf-8") as file:
                for row in map(json.loads, lines):
                    file.write(
                        f"step {row['step']:>7}  loss {row['loss'] or 0:.4f}  {row['steps_per_s']:.2f} steps/s\n"
                    )
        self._lines.clear()


@asynccontextmanager
async def open_simulated_daemon(
    folder: Path,
    cluster: Cluster,
    policy: Policy,
    arrivals: Sequence[Arrival] = (),
    *,
    world: DemoWorld | None = None,
    live_from: float = 0.0,
    speed: float = 1.0,
    report_every_s: float = 1.0,
    name: str = "show",
) -> AsyncIterator[SchedulerService]:
    """A service over a daemon with simulated jobs; what happened before `live_from` is simulated at once.

    `live_from` is now; the store holds nothing that happened before.
    """
    world = world or DemoWorld()
    machine = SimulatedExecutor(cluster, world, speed=speed, report_every_s=report_every_s)
    machine.arrive(arrivals)
    calendar = TimeBase(time.time() - live_from)
    ledger, spans, papers, present = JobAccounting(cluster), AllocationHistory(cluster), Papers(folder), Present()
    chronicle = EventLog(EventFeed(), calendar.unix)
    estimates = world.estimator()
    observers = (ledger, spans, chronicle, machine, present)
    scheduler = Scheduler(cluster, policy, estimator=estimates, observers=observers, find_policy=parse_policy)
    machine.live_through(scheduler, live_from, papers.hear)
    papers.write()

    def take(at: float, report: Report) -> None:
        chronicle.on_report(at, report)
        papers.hear(at, report)
        papers.write()

    store = present.store = Store.open(folder / "store", Header("1", name, cluster))
    programs = {spec.id: Program(entry=f"trainings/{spec.model or 'training'}.py:main") for _, spec in arrivals}
    executors, options = ExecutorGroup({LOCAL: machine}), LoopOptions(commit=commit_inline)
    daemon = DaemonLoop(scheduler, store, executors, machine, LoopHooks(on_report=take), options, programs=programs)
    names = {device: f"{node.name}:{device - node.devices.start}" for node in cluster.nodes for device in node.devices}
    premises = ReadModel(
        loop=daemon,
        scheduler=scheduler,
        accounting=ledger,
        estimates=estimates,
        allocations=spans,
        events=chronicle,
        programs=programs,
        total_steps=lambda job: ledger.accounts[job].spec.work,
        state=folder,
        names=names,
        calendar=calendar,
        now=machine.now,
        version="1",
        policy=lambda: scheduler.policy_text or name,
    )
    async with at_work(premises, store):
        yield SchedulerService(premises)


class Present:
    """An observer that passes new records to a store."""

    store: Store | None = None

    def record(self, record: Record) -> None:
        """Pass a record on."""
        if self.store is not None:
            self.store.record(record)


def _or_never(at: float | None) -> float:
    return inf if at is None else at


def _submitted(spec: JobSpec, at: float) -> Fact:
    return JobSubmitted(spec)
