"""A daemon with nothing behind it but the simulator's machines: its past in no time, its present by the clock."""

from __future__ import annotations

import asyncio
import contextlib
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

from carpool.backends.ledger import Ledger
from carpool.core.balance import Balance
from carpool.core.estimates import Estimator
from carpool.core.journal import Header
from carpool.core.messages import Fact, JobSubmitted, Order, ProgressReported, Record
from carpool.core.model import JobId, JobSpec
from carpool.core.policy import Policy
from carpool.core.scheduler import Scheduler
from carpool.core.topology import Cluster, Placement
from carpool.runtime.jobfolder import JobFolder
from carpool.runtime.program import Program
from carpool.runtime.reports import Facts, Gone, Report
from carpool.service.chronicle import Chronicle
from carpool.service.clerk import Clerk, Premises
from carpool.service.daemon import Daemon
from carpool.service.feed import Feed
from carpool.service.showing import Calendar
from carpool.service.spans import Spans
from carpool.service.store import Details, Store
from carpool.sim.machines import Machines
from carpool.sim.timeline import ARRIVALS, Timeline
from carpool.sim.traces.trace import Arrival
from carpool.sim.world import Pace, PlainWorld, Signs


@dataclass(frozen=True, slots=True)
class ShowWorld:
    """The plain world with trainings that show a loss and get on at so many steps a second and device."""

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

    def price(self, spec: JobSpec, before: Placement | None, after: Placement) -> float:
        """As in the plain world."""
        return self.plain.price(spec, before, after)

    def signs(self, spec: JobSpec, done: float, placement: Placement) -> Signs:
        """A loss that falls and trembles: 0.2 + 2.1·e^(−5·done/work), by three per cent up and down."""
        part = done / max(1.0, self.work(spec))
        seed = crc32(spec.id.encode())
        tremble = 0.03 * sin(97.0 * part + seed) + 0.02 * sin(431.0 * part + seed % 7)
        return Signs(loss=(0.2 + seed % 9 / 30 + 2.1 * exp(-5.0 * part)) * (1.0 + tremble))

    def kept(self, spec: JobSpec, done: float) -> float:
        """Nothing is lost."""
        return self.plain.kept(spec, done)

    def estimator(self) -> Estimator:
        """What was declared."""
        return self.plain.estimator()


class ShowMachine:
    """The simulator's machines as an executor and its clock; virtual until `live_from`, then real.

    Implements `backends.local.Link` and `backends.local.Pace`, and observes the scheduler to learn of jobs.
    """

    def __init__(
        self,
        cluster: Cluster,
        world: ShowWorld,
        *,
        live_from: float = 0.0,
        speed: float = 1.0,
        report_every_s: float = 1.0,
    ) -> None:
        self.is_live = asyncio.Event()  # whether the past is over
        self.life = 1  # it is always the same executor
        self.heard = 0  # the number of the report that was given away last
        self._timeline = Timeline()
        self._machines = Machines(cluster, world, self._timeline, sharing=True, report_every_s=report_every_s)
        self._live_from = live_from
        self._speed = speed
        self._at = 0.0
        self._began = 0.0  # on the real clock, at `live_from`
        self._queue: asyncio.Queue[Report] = asyncio.Queue()

    def record(self, record: Record) -> None:
        """Learn of jobs."""
        for fact in record.facts:
            if isinstance(fact, JobSubmitted):
                self._machines.introduce(fact.spec)

    def arrive(self, arrivals: Iterable[Arrival]) -> None:
        """Let jobs be submitted in time."""
        for at, spec in arrivals:
            self._timeline.add(at, ARRIVALS, partial(_submitted, spec))

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

    async def leave(self) -> None:
        """Nobody will claim it."""

    async def stop(self, *, checkpoint: bool) -> None:
        """Nothing has to be kept."""
        self._queue.put_nowait(Gone("it was told to stop"))

    # --------------------------------------------------------------------------------------------------- as a clock
    def now(self) -> float:
        """Seconds since the beginning."""
        if self.is_live.is_set():
            return self._live_from + (time.monotonic() - self._began) * self._speed
        return self._at

    async def wait(self, tasks: set[asyncio.Task[Any]], until: float | None) -> None:
        """Let tasks do what they can; then let time pass to what happens next."""
        for _ in range(5):
            await asyncio.sleep(0)
        if any(task.done() for task in tasks):
            return
        following = min(
            inf if until is None else until, inf if self._timeline.next_at is None else self._timeline.next_at
        )
        if not self.is_live.is_set():
            self._at = max(self._at, min(following, self._live_from))
            if following > self._live_from:
                self._began = time.monotonic()
                self.is_live.set()
        if self.is_live.is_set():
            timeout = None if following == inf else max(0.0, following - self.now()) / self._speed
            await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        self._say(self._timeline.happen(self.now()))

    def _say(self, facts: Sequence[Fact]) -> None:
        if facts:
            self._queue.put_nowait(Facts(tuple(facts)))


class ShowStore(Store):
    """A store that writes nothing of the past: a thousand jobs are there in a second."""

    is_past = True

    def commit(self) -> None:
        """Make durable what was taken in, once the past is over."""
        if not self.is_past:
            super().commit()

    def keep_balance(self, balance: Balance, details: Details | None = None) -> None:
        """Keep a balance, once the past is over."""
        if not self.is_past:
            super().keep_balance(balance, details)


class Papers:
    """What trainings would leave in their folders: a log and a curve, written once the past is over."""

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
async def showroom(
    folder: Path,
    cluster: Cluster,
    policy: Policy,
    arrivals: Iterable[Arrival] = (),
    *,
    world: ShowWorld | None = None,
    live_from: float = 0.0,
    speed: float = 1.0,
    report_every_s: float = 1.0,
    name: str = "show",
) -> AsyncIterator[Clerk]:
    """A clerk over a daemon whose jobs only pretend to train; what happened before `live_from` is over at once.

    `live_from` is now: the calendar is set so.
    """
    world = world or ShowWorld()
    machine = ShowMachine(cluster, world, live_from=live_from, speed=speed, report_every_s=report_every_s)
    calendar = Calendar(time.time() - live_from)
    store = ShowStore.open(folder / "store", Header("1", name, cluster))
    assert isinstance(store, ShowStore)
    ledger, spans, papers = Ledger(), Spans(cluster), Papers(folder)
    chronicle = Chronicle(Feed(), calendar.unix)
    estimates = world.estimator()
    scheduler = Scheduler(cluster, policy, estimator=estimates, observers=(store, ledger, spans, chronicle, machine))

    def take(at: float, report: Report) -> None:
        chronicle.hear(at, report)
        papers.hear(at, report)
        if machine.is_live.is_set():
            papers.write()

    async def commit(write: Callable[[], None]) -> None:
        write()

    names = {device: f"{node.name}:{device - node.devices.start}" for node in cluster.nodes for device in node.devices}
    programs = _Programs(ledger)
    daemon = Daemon(scheduler, store, machine, machine, take=take, commit=commit)
    premises = Premises(
        daemon, scheduler, ledger, estimates, spans, chronicle, programs, programs.total, folder, names,
        calendar, machine.now, "1", lambda: name,
    )  # fmt: skip
    machine.arrive(arrivals)
    running = asyncio.create_task(daemon.run())
    live = asyncio.create_task(machine.is_live.wait())
    await asyncio.wait({running, live}, return_when=asyncio.FIRST_COMPLETED)
    store.is_past = False
    papers.write()
    try:
        yield Clerk(premises)
    finally:
        chronicle.feed.close()
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        store.close()


class _Programs(dict[JobId, Program]):
    """A made-up program for every job."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self._ledger = ledger

    def get(self, job: JobId, default: Any = None) -> Any:
        """Its model's entry."""
        account = self._ledger.accounts.get(job)
        return default if account is None else Program(entry=f"trainings/{account.spec.model or 'training'}.py:main")

    def total(self, job: JobId) -> float | None:
        """What was declared."""
        return self._ledger.accounts[job].spec.work


def _submitted(spec: JobSpec, at: float) -> Fact:
    return JobSubmitted(spec)
