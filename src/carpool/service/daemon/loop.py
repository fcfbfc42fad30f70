"""Scheduling loop: folds commands and reports, commits them, and only then sends orders and answers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from carpool.backends.executors import (
    ExecutorGone,
    ExecutorGroup,
    ExecutorPort,
    Introduction,
    ReportInbox,
    WaitableClock,
)
from carpool.core.messages import (
    Assign,
    Fact,
    JobCancelled,
    JobFailed,
    JobFinished,
    JobSubmitted,
    Order,
    Record,
    Woke,
)
from carpool.core.model import JobId
from carpool.core.scheduler import Scheduler
from carpool.core.state.state_snapshot import StateSnapshot
from carpool.jobs.job_file import ListedJob
from carpool.jobs.program import Program
from carpool.logs import log_event
from carpool.runtime.executor.client_protocol import report_to_json
from carpool.runtime.executor.reports import Facts, Gone, HandedOver, InvalidReport, Outcome, Report, Sized, Told
from carpool.service.daemon.group_commit import Commit, GroupCommit, ReadOnly
from carpool.service.daemon.policy_guard import PlanningBudget
from carpool.service.store.disk_space import DiskReserve
from carpool.service.store.store import ExecutorMark, Store, snapshot_text

_RECORDS_RETAINED = 100_000  # for job histories; replaying them at a start takes some seconds
# folding them takes a fraction of a second; with more jobs than that, as many records as jobs
_RECORDS_PER_SNAPSHOT = 1000

_log = logging.getLogger(__name__)

RenewExecutor = Callable[[str, str], Awaitable[tuple[ExecutorPort, Sequence[Fact]]]]  # of name and reason


class LoopEnd:
    """Decides when the loop ends by itself: by default never."""

    def is_over(self, scheduler: Scheduler) -> bool:
        return False

    def starved(self, scheduler: Scheduler) -> Sequence[Fact]:
        """Failures of jobs that will never be scheduled."""
        return ()


class EndWhenDone(LoopEnd):
    """Ends when every job is over; jobs that wait while nothing runs and nothing else can happen fail."""

    def __init__(self, *, may_grow: bool = False) -> None:
        self._may_grow = may_grow  # machines may join

    def is_over(self, scheduler: Scheduler) -> bool:
        return not scheduler.jobs

    def starved(self, scheduler: Scheduler) -> Sequence[Fact]:
        if self._may_grow or scheduler.num_running or scheduler.wake_at is not None or scheduler.outsiders:
            return ()
        error = f"policy {scheduler.policy!r} will never assign devices to this job"
        return [JobFailed(job.id, job.generation, error) for job in scheduler.jobs.values()]


@dataclass(frozen=True, slots=True)
class LoopHooks:
    """Functions that the loop calls."""

    before_submit: Callable[[Sequence[ListedJob]], None] = lambda jobs: None  # before the jobs are planned
    on_submit: Callable[[Sequence[ListedJob]], None] = lambda jobs: None
    on_report: Callable[[float, Report], None] = lambda at, report: None  # after the scheduler has folded its facts
    sized: Callable[[JobId], Sized | None] = lambda job: None  # what a training reported about its length
    follow_up: Callable[[], Sequence[Fact]] = lambda: ()  # further facts that follow from the facts and reports so far
    # returns the function to call after the commit
    before_commit: Callable[[], Callable[[], None]] = lambda: lambda: None
    tell_operator: Callable[[str], None] = lambda words: None
    renew: RenewExecutor | None = None  # replaces an executor that is gone; without it the loop raises ExecutorGone


@dataclass(frozen=True, slots=True)
class LoopOptions:
    """How a loop commits, plans and ends."""

    commit: Commit = asyncio.to_thread
    retain: int = _RECORDS_RETAINED
    planning_share: float = 0.2  # of the time, at most
    reserve: DiskReserve | None = None  # disk space for commits on a full disk
    retry_s: float = 2.0  # between attempts to write on a full disk
    introduce_early: bool = False  # tell executors of jobs when they are submitted, not with their first order
    end: LoopEnd = field(default_factory=LoopEnd)


@dataclass(slots=True)
class _Pending:
    """The work to do once the records of the next commit are durable."""

    orders: list[Order] = field(default_factory=list)  # to be sent
    submitted: list[JobId] = field(default_factory=list)  # to be introduced
    ended: list[JobId] = field(default_factory=list)  # to be forgotten
    heard: dict[str, ExecutorMark] = field(default_factory=dict)  # by executor: to be acknowledged


class DaemonLoop:
    """Runs a scheduler against executors and a store.

    Facts are folded as they arrive. Their records are committed in groups, and only then are orders sent, callers
    answered and reports acknowledged: after a crash, the journal holds everything that was promised. Each record
    carries the number of the last report included in it, so that no report is lost or counted twice.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        store: Store,
        executors: ExecutorGroup,
        clock: WaitableClock,
        hooks: LoopHooks | None = None,
        options: LoopOptions | None = None,
        *,
        programs: Mapping[JobId, Program] | None = None,
        notes: Mapping[JobId, Mapping[str, Any]] | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._store = store
        self._executors = executors
        self._clock = clock
        self._hooks = hooks or LoopHooks()
        self._options = options or LoopOptions()
        self._programs = dict(programs or {})  # of jobs that are not over
        self._notes = dict(notes or {})  # notes of the same jobs
        self.leaves_running = False
        self._stopping, self._aborting = asyncio.Event(), asyncio.Event()
        self._inbox = ReportInbox(executors, clock)
        self._renewing: dict[str, asyncio.Future[tuple[ExecutorPort, Sequence[Fact]]]] = {}  # executors that are gone
        self._fresh: set[JobId] = set()  # jobs that no executor has ever known
        # by executor: outcomes whose facts are still to come, and the reports after them
        self._held: dict[str, list[Report]] = {}
        self._pending = _Pending()
        self._commits = GroupCommit(
            store,
            self._prepare_commit,
            self._hooks.tell_operator,
            self._stopping,
            commit=self._options.commit,
            reserve=self._options.reserve,
            retry_s=self._options.retry_s,
        )
        self._budget = PlanningBudget(self._options.planning_share)
        self._since_snapshot = 0
        self._snapshotting: asyncio.Task[None] | None = None
        self._is_ending = False  # no further member can join
        scheduler.add_observer(self)

    def record(self, record: Record) -> None:
        self._since_snapshot += 1
        for fact in record.facts:
            if isinstance(fact, JobFinished | JobFailed | JobCancelled):
                self._pending.ended.append(fact.job)
                self._programs.pop(fact.job, None)
                self._notes.pop(fact.job, None)

    async def submit(self, jobs: Sequence[ListedJob], note: Mapping[str, Any] | None = None) -> None:
        """Accept jobs, all or none; returns when they are durable. InputError for a name that is taken.

        `note` is stored with each of them, as JSON values. ReadOnly while the disk is full.
        """
        if self.disk_full:
            raise ReadOnly(f"{self.disk_full}. No jobs are accepted until there is room: free disk space.")
        await asyncio.shield(self._submit((), jobs, note))

    def _submit(
        self, facts: Sequence[Fact], jobs: Sequence[ListedJob], note: Mapping[str, Any] | None = None
    ) -> asyncio.Future[None]:
        self._hooks.before_submit(jobs)
        for spec, program in jobs:
            self._store.detail(spec.id, _details(program, note))
        durable = self._handle([*facts, *(JobSubmitted(spec) for spec, _ in jobs)])
        for spec, program in jobs:
            self._programs[spec.id] = program
            self._fresh.add(spec.id)
            self._pending.submitted.append(spec.id)
            if note:
                self._notes[spec.id] = note
        self._hooks.on_submit(jobs)
        return durable

    async def apply(self, *facts: Fact) -> None:
        """Fold a user's facts: jobs cancelled, paused, resumed, changed; returns when they are durable."""
        await asyncio.shield(self._handle(facts))

    async def flush(self) -> None:
        """Return when everything folded so far is durable."""
        await self._commits.flush()

    @property
    def disk_full(self) -> str:
        """Why no jobs are accepted; empty: they are."""
        return self._commits.disk_full

    def hold_reserve(self) -> None:
        """Allocate disk space for commits on a full disk; without room for it no jobs are accepted."""
        self._commits.hold_reserve()

    def tell(self, job: JobId, words: str) -> None:
        self._keep_report(self._now(), Told(job, words))

    def is_connected(self, name: str) -> bool:
        """Whether an executor is connected, and not being replaced."""
        return self._inbox.is_listening(name) and self._executors[name].life > 0

    def use(self, name: str, port: ExecutorPort, facts: Sequence[Fact] = ()) -> bool:
        """Use a port for a new member, or instead of a member's current one; False if the loop is ending.

        The facts are folded in the same instant; the previous port is left to the caller.
        """
        if self._is_ending or self._stopping.is_set():
            return False
        self._inbox.ignore(name)
        self._executors.replace(name, port)
        self._set_mark(name, port)
        if facts:
            self._handle(facts)
        self._inbox.listen(name)
        return True

    def drop(self, name: str) -> ExecutorPort | None:
        """Forget a member that is away for good. Returns the port that stood for it, or None if it is connected."""
        if self._is_ending or name in self._renewing or self.is_connected(name):
            return None
        self._inbox.ignore(name)
        self._held.pop(name, None)
        self._pending.heard.pop(name, None)
        return self._executors.remove(name)

    def proceed(self) -> None:
        for _, port in self._executors:
            port.proceed()

    def stop(self, *, leave_running: bool = False) -> None:
        """Stop all jobs at a step boundary with checkpoints and end; or leave them to the next daemon."""
        self.leaves_running = leave_running
        self._stopping.set()

    def abort(self) -> None:
        self._aborting.set()
        self._stopping.set()

    async def run(self, facts: Sequence[Fact] = (), jobs: Sequence[ListedJob] = ()) -> None:
        committing = asyncio.create_task(self._commits.run())
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            for name, port in self._executors:
                self._inbox.listen(name)
                self._set_mark(name, port)
            if facts or jobs:
                self._submit(facts, jobs)
            while not (self._stopping.is_set() or committing.done() or self._options.end.is_over(self._scheduler)):
                if starved := self._options.end.starved(self._scheduler):
                    self._handle(starved)
                    continue
                await self._inbox.wait({stopping, committing}, self._scheduler.wake_at)
                self._take_reports()
                self._wake()
            self._is_ending = True
            await self._finish_renewals()
            if not committing.done() and not self.leaves_running:
                await self._shut_down()
        finally:
            self._inbox.close()
            stopping.cancel()
            for renewing in self._renewing.values():
                renewing.cancel()
            if self._snapshotting is not None:
                await self._snapshotting
            await self._commits.close(committing)
            if self.leaves_running:
                for _, port in self._executors:
                    await port.leave()

    def _take_reports(self) -> None:
        for name, report in self._inbox.take():
            if isinstance(report, Gone) and self._hooks.renew is not None:
                self._renew(name, report, self._hooks.renew)
            else:
                self._take(name, report)
                self._inbox.listen(name)
        for name in [name for name, task in self._renewing.items() if task.done()]:
            self._take_renewed(name)

    def _take(self, name: str, report: Report, *, carry: bool = True) -> None:
        """Fold a report. An `Outcome` and later reports wait for the `Facts` of that end: all are stored, or none."""
        if isinstance(report, Gone):
            raise ExecutorGone(f"the executor ended: {report.reason}")
        held = self._held.setdefault(name, [])
        if isinstance(report, HandedOver):
            if carry:
                self._executors.handed_over(name, report.job)
            if not held:
                self._set_mark(name, self._executors[name])
            return
        if isinstance(report, Outcome) or (held and not isinstance(report, Facts)):
            held.append(report)
            return
        at = self._now()
        self._held[name] = []
        self._set_mark(name, self._executors[name])
        for each in held:
            self._keep_report(at, each)
        if isinstance(report, Facts):
            if facts := [*self._executors.current(name, report.facts), *self._failures(report.invalid)]:
                self._handle(facts, carry=carry)
            self._hooks.on_report(at, report)
        else:
            self._keep_report(at, report)
        if more := self._hooks.follow_up():
            self._handle(more, carry=carry)

    def _failures(self, invalid: Sequence[InvalidReport]) -> Iterator[Fact]:
        """End the jobs that invalid reports are about."""
        for job, reason in invalid:
            log_event(_log, "report_refused", level=logging.ERROR, job=job, reason=reason)
            if job in self._scheduler.jobs:
                yield JobFailed(job, self._scheduler.jobs[job].generation, reason)

    def _keep_report(self, at: float, report: Report) -> None:
        self._store.add_report(at, report_to_json(report))
        self._commits.request()
        self._hooks.on_report(at, report)

    def _renew(self, name: str, gone: Gone, renew: RenewExecutor) -> None:
        """Replace an executor that is gone; the reports of others are handled meanwhile."""
        log_event(_log, "executor_gone", level=logging.ERROR, executor=name, reason=gone.reason)
        self._held.pop(name, None)  # reports without their facts: those steps are repeated
        self._renewing[name] = task = asyncio.ensure_future(renew(name, gone.reason))
        task.add_done_callback(lambda _: self._inbox.wake())

    async def _finish_renewals(self) -> None:
        """Wait for executors that are being replaced, so that new ones are stopped, too; not when aborted."""
        renewed: asyncio.Future[Any] = asyncio.gather(*self._renewing.values(), return_exceptions=True)
        aborting: asyncio.Future[Any] = asyncio.ensure_future(self._aborting.wait())
        await asyncio.wait([renewed, aborting], return_when=asyncio.FIRST_COMPLETED)
        aborting.cancel()
        for name in [name for name, task in self._renewing.items() if task.done()]:
            self._take_renewed(name)

    def _take_renewed(self, name: str) -> None:
        port, facts = self._renewing.pop(name).result()
        self._executors.replace(name, port)
        self._set_mark(name, port)
        self._handle(facts)
        port.proceed()
        self._inbox.listen(name)

    def _set_mark(self, name: str, port: ExecutorPort) -> None:
        """Set an executor's last report, for the next record to store.

        When an executor was replaced, the first record that names the new one also says that the old one is gone.
        """
        if port.life:  # 0: the member is away
            self._pending.heard[name] = mark = ExecutorMark(port.life, port.heard)
            self._store.set_mark(name, mark)

    async def end_executors(self, names: Collection[str] | None = None, *, checkpoint: bool = True) -> None:
        """End executors, all or those named, and store their last reports; before `run`."""
        for name, _ in self._executors:
            if names is None or name in names:
                self._inbox.listen(name)
        await self._shut_down(checkpoint=checkpoint)
        await self._commits.commit_once()

    def _handle(self, facts: Sequence[Fact], *, carry: bool = True) -> asyncio.Future[None]:
        """Fold facts and plan; orders wait for the commit. The future resolves when the facts are durable."""
        orders = self._plan(facts)
        while more := self._hooks.follow_up():
            orders += self._plan(more)
        if carry:
            self._pending.orders += orders
        return self._commits.request()

    def _plan(self, facts: Sequence[Fact]) -> list[Order]:
        """Fold facts and plan; after a slow plan the next one waits, so that requests are answered in between."""
        before, began = self._scheduler.timing.planned_at, self._budget.begin()
        orders = self._scheduler.handle(self._now(), facts)
        if self._scheduler.timing.planned_at != before:
            self._scheduler.timing.min_pause_s = self._budget.after(began)
        return orders

    def _now(self) -> float:
        """The time; never before what the scheduler has seen."""
        return max(self._clock.now(), self._scheduler.at)

    def _wake(self) -> None:
        wake_at = self._scheduler.wake_at
        if wake_at is not None and self._now() >= wake_at:
            self._handle((Woke(),))

    def _prepare_commit(self) -> Callable[[], None]:
        """Give the store the data of the next commit. Returns what must wait for it: orders, acknowledgements."""
        pending, self._pending = self._pending, _Pending()
        self._store.flush_reports(self._scheduler.at)
        finish = self._hooks.before_commit()

        def on_durable() -> None:
            finish()
            self._carry(pending.orders, pending.submitted if self._options.introduce_early else ())
            for job in pending.ended:
                self._fresh.discard(job)
                self._executors.forget(job)
            self._acknowledge(pending.heard)
            self._snapshot_if_due()

        return on_durable

    def _carry(self, orders: Sequence[Order], submitted: Sequence[JobId]) -> None:
        """Send orders; an executor learns of a job with its first order, or when it is submitted."""
        named = dict.fromkeys([*submitted, *(order.job for order in orders)])
        known = {
            job: Introduction(self._programs[job], resume=job not in self._fresh)
            for job in named
            if job in self._programs
        }
        for job in submitted:
            if job in known:
                self._executors.introduce(job, known[job])
        self._executors.carry(orders, known)
        self._fresh.difference_update(known)
        if _log.isEnabledFor(logging.INFO):
            for order in orders:
                devices = list(order.allocation.devices()) if isinstance(order, Assign) else []
                kind = type(order).__name__.lower()
                log_event(_log, "order", order=kind, job=order.job, generation=order.generation, devices=devices)

    def _acknowledge(self, heard: Mapping[str, ExecutorMark]) -> None:
        for name, mark in heard.items():
            port = self._executors.get(name)
            if port is not None and mark.life == port.life:
                port.acknowledge(mark.heard)

    def store_snapshot(self) -> None:
        """Store a snapshot, so that the next start folds only later records; skipped if the disk is full."""
        with contextlib.suppress(OSError, sqlite3.Error):
            self._store.store_snapshot(*self._snapshot())
            self._store.retain(self._options.retain)

    def _snapshot_if_due(self) -> None:
        if self._since_snapshot >= max(_RECORDS_PER_SNAPSHOT, len(self._scheduler.jobs)) and not self._snapshotting:
            self._snapshotting = asyncio.create_task(self._snapshot_aside())

    async def _snapshot_aside(self) -> None:
        """Serialize a snapshot the way commits are run, and store it with the next commit."""
        kept = self._store.take_snapshot(*self._snapshot())
        text = None

        def write() -> None:
            nonlocal text
            text = snapshot_text(kept)

        await self._commits.commit(write)
        assert text is not None
        self._store.store_snapshot_later(kept, text, self._options.retain)
        self._snapshotting = None
        self._commits.request()

    def _snapshot(self) -> tuple[StateSnapshot, dict[JobId, Mapping[str, Any]]]:
        self._since_snapshot = 0
        jobs = self._scheduler.jobs
        return self._scheduler.state(), {
            job: _details(program, self._notes.get(job), self._hooks.sized(job))
            for job, program in self._programs.items()
            if job in jobs
        }

    async def _shut_down(self, *, checkpoint: bool | None = None) -> None:
        """Stop the executors, with checkpoints while jobs are left, and handle their last reports.

        Orders of the scheduler are no longer sent.
        """
        checkpoint = bool(self._scheduler.jobs) if checkpoint is None else checkpoint
        ports = [self._executors[name] for name in self._inbox.names]
        stops = [asyncio.create_task(port.stop(checkpoint=checkpoint)) for port in ports]
        aborting = asyncio.create_task(self._aborting.wait())
        try:
            while self._inbox.names or not all(stop.done() for stop in stops):
                if aborting.done():
                    for stop in stops:
                        stop.cancel()
                    stops = [asyncio.create_task(port.stop(checkpoint=False)) for port in ports]
                    break
                pending = next((stop for stop in stops if not stop.done()), aborting)
                await self._inbox.wait({pending, aborting}, None)
                self._take_last_reports()
            await asyncio.gather(*stops)
        finally:
            aborting.cancel()

    def _take_last_reports(self) -> None:
        for name, report in self._inbox.take():
            if not isinstance(report, Gone):
                self._take(name, report, carry=False)
                self._inbox.listen(name)


def _details(program: Program, note: Mapping[str, Any] | None, sized: Sized | None = None) -> dict[str, Any]:
    """The data of a job that the store keeps beside its spec."""
    details: dict[str, Any] = {"program": program.as_json()}
    if note:
        details["note"] = dict(note)
    if sized is not None:  # reported once, in a record that a snapshot may replace
        details["sized"] = report_to_json(sized)
    return details
