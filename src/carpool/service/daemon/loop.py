"""Daemon loop: folds commands and reports, commits them, and only then sends orders and answers."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from carpool.backends.local import DurableExecutorPort, ExecutorGone, WaitableClock
from carpool.core.errors import CarpoolError
from carpool.core.messages import Fact, JobCancelled, JobFailed, JobFinished, JobSubmitted, Order, Record, Woke
from carpool.core.model import JobId
from carpool.core.scheduler import Scheduler
from carpool.core.state.state_snapshot import StateSnapshot
from carpool.jobs.job_file import ListedJob
from carpool.jobs.program import Program
from carpool.runtime.executor.client_protocol import report_to_json
from carpool.runtime.executor.reports import Facts, Gone, Outcome, Report, Sized, Told
from carpool.service.daemon.policy_guard import PlanningBudget
from carpool.service.store.store import CommitMark, Store, snapshot_text

RenewExecutor = Callable[[str], Awaitable[tuple[DurableExecutorPort, Sequence[Fact]]]]


@dataclass(frozen=True, slots=True)
class LoopHooks:
    """Functions that a daemon calls; where one is left out, nobody wants to know."""

    expect: Callable[[Sequence[ListedJob]], None] = lambda jobs: None  # before anything is decided about these jobs
    accept: Callable[[Sequence[ListedJob]], None] = lambda jobs: None  # they are submitted
    take: Callable[[float, Report], None] = lambda at, report: None  # after the scheduler has had the facts in it
    sized: Callable[[JobId], Sized | None] = lambda job: None  # what a training has told of itself
    cut: Callable[[], Callable[[], None]] = lambda: lambda: None  # before a commit: what is to be done behind it
    renew: RenewExecutor | None = None  # another executor for one that is gone, and why; without it the daemon ends


Commit = Callable[[Callable[[], None]], Awaitable[None]]

_RECORDS_RETAINED = 100_000  # for stories and figures; showing them to all who follow takes some seconds
_RECORDS_PER_BALANCE = 1000  # folding so many takes a fraction of a second; with more jobs, as many as there are


class CommitFailed(CarpoolError):
    """What was asked could not be made durable: it counts as never asked."""


class DaemonLoop:
    """Runs a scheduler for as long as somebody wants it, against one executor and one store.

    Facts are folded as they come. The records they leave are made durable in groups, aside, and only then are the
    orders that follow passed on and those who asked told: after a crash nobody has been promised what the journal
    does not know. Reports are acknowledged then too, and not before: with each record goes the number of the last
    one that it knows of, so that none is lost and none counts twice.

    `introduced` are the jobs that the executor knows already. An executor that is gone is replaced by one that the host
    renews, and facts say what that meant for the devices.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        store: Store,
        link: DurableExecutorPort,
        clock: WaitableClock,
        host: LoopHooks | None = None,
        *,
        programs: Mapping[JobId, Program] | None = None,
        notes: Mapping[JobId, Mapping[str, Any]] | None = None,
        introduced: Collection[JobId] = (),
        commit: Commit = asyncio.to_thread,
        retain: int = _RECORDS_RETAINED,
    ) -> None:
        self._scheduler = scheduler
        self._store = store
        self._link = link
        self._clock = clock
        self._host = host or LoopHooks()
        self._programs = dict(programs or {})  # of jobs that are not over
        self._notes = dict(notes or {})  # likewise
        self._run_commit = commit
        self._retain = retain
        self._leaves = False  # the executor to whoever comes next
        self._stopping = asyncio.Event()
        self._dirty = asyncio.Event()
        self._introduced = set(introduced)  # jobs that the executor knows
        self._fresh: set[JobId] = set()  # jobs that no executor has ever known
        self._orders: list[Order] = []  # their records not yet durable
        self._ended: list[JobId] = []  # likewise
        self._held: list[Report] = []  # endings without the facts that belong to them, and what came behind
        self._kept: asyncio.Future[None] | None = None  # resolved when all that was folded until now is durable
        self._committing: asyncio.Future[None] | None = None  # the same of what is just being written
        self._breath = PlanningBudget()
        self._since_balance = 0
        self._balancing: asyncio.Task[None] | None = None
        self._is_closing = False
        scheduler.add_observer(self)

    def record(self, record: Record) -> None:
        """See which jobs have come to their end."""
        self._since_balance += 1
        for fact in record.facts:
            if isinstance(fact, JobFinished | JobFailed | JobCancelled):
                self._ended.append(fact.job)
                self._programs.pop(fact.job, None)
                self._notes.pop(fact.job, None)

    # ------------------------------------------------------------------------------------------------------- wishes
    async def submit(self, jobs: Sequence[ListedJob], note: Mapping[str, Any] | None = None) -> None:
        """Accept jobs, all or none; returns when they can no longer be lost. InputError for a name that is taken.

        `note` is what whoever asked wants kept with each of them, as JSON values.
        """
        self._host.expect(jobs)
        for spec, program in jobs:
            self._store.detail(spec.id, _details(program, note))
        kept = self._handle([JobSubmitted(spec) for spec, _ in jobs])
        for spec, program in jobs:
            self._programs[spec.id] = program
            self._fresh.add(spec.id)
            if note:
                self._notes[spec.id] = note
        self._host.accept(jobs)
        await asyncio.shield(kept)  # others wait for it too: whoever goes away takes nothing from them

    async def settle(self) -> None:
        """Return when all that was taken in until now can no longer be lost."""
        await asyncio.gather(*[asyncio.shield(kept) for kept in (self._committing, self._kept) if kept is not None])

    async def wish(self, *facts: Fact) -> None:
        """Take in what a user wants of jobs: cancelled, paused, resumed; returns when it can no longer be lost."""
        await asyncio.shield(self._handle(facts))

    def tell(self, job: JobId, words: str) -> None:
        """Add something to a job's story."""
        self._note(self._now(), Told(job, words))

    def proceed(self) -> None:
        """Let jobs go on that stood still because no daemon was there."""
        self._link.proceed()

    def stop(self, *, leave_running: bool = False) -> None:
        """Halt all jobs at a step boundary, with checkpoints, and end; or leave them to the next daemon as they are."""
        self._leaves = leave_running
        self._stopping.set()

    # --------------------------------------------------------------------------------------------------------- loop
    async def run(self, facts: Sequence[Fact] = ()) -> None:
        """Begin with these facts and go on until `stop`."""
        committing = asyncio.create_task(self._commit_always())
        stopping = asyncio.create_task(self._stopping.wait())
        receiving = asyncio.create_task(self._link.receive())
        try:
            self._mark()
            if facts:
                self._handle(facts)
            while not self._stopping.is_set() and not committing.done():
                await self._clock.wait({receiving, stopping, committing}, self._scheduler.wake_at)
                if receiving.done():
                    report = receiving.result()
                    if isinstance(report, Gone) and self._host.renew is not None:
                        await self._replace(report, self._host.renew)
                    else:
                        self._hear(report)
                    receiving = asyncio.create_task(self._link.receive())
                self._wake()
            if not committing.done() and not self._leaves:
                await self._end(receiving)
        finally:
            for task in (stopping, receiving):
                task.cancel()
            await self._last_commit(committing)
            if self._leaves:
                await self._link.leave()

    def _hear(self, report: Report, *, carry: bool = True) -> None:
        """Take a report in.

        How a job ended is held until the fact that it did, which follows: both are kept, or none.
        """
        if isinstance(report, Gone):
            raise ExecutorGone(f"the executor has gone: {report.reason}")
        if isinstance(report, Outcome) or (self._held and not isinstance(report, Facts)):
            self._held.append(report)
            return
        at = self._now()
        self._mark()
        held, self._held = self._held, []
        for each in held:
            self._note(at, each)
        if isinstance(report, Facts):
            if report.facts:
                self._handle(report.facts, carry=carry)
            self._host.take(at, report)
        else:
            self._note(at, report)

    def _note(self, at: float, report: Report) -> None:
        self._store.note(at, report_to_json(report))
        self._dirty.set()
        self._host.take(at, report)

    async def _replace(self, gone: Gone, renew: RenewExecutor) -> None:
        link, facts = await renew(gone.reason)
        self._held.clear()  # what the one before did not come to tell is done again
        self.go_on_with(link)
        self._mark()
        self._handle(facts)
        link.proceed()

    def _mark(self) -> None:
        """Let the next record say which executor is heard, and how far.

        The first record with another executor's life holds the facts that the one before is gone.
        """
        self._store.mark = CommitMark(self._store.mark.epoch, self._link.life, self._link.heard)

    def go_on_with(self, link: DurableExecutorPort) -> None:
        """Work with a new executor, which knows no job."""
        self._link = link
        self._introduced.clear()

    async def let_end(self) -> None:
        """End the executor with checkpoints and hear its last words, before `run`: another shall take its place."""
        await self._end(asyncio.create_task(self._link.receive()))
        await self._commit_once()

    def _handle(self, facts: Sequence[Fact], *, carry: bool = True) -> asyncio.Future[None]:
        """Fold facts; what follows from them waits for the commit. The future says when they are durable."""
        orders = self._decide(facts)
        if carry:
            self._orders += orders
        self._dirty.set()
        return self._promise()

    def _promise(self) -> asyncio.Future[None]:
        """Resolved when all that was folded until now is durable."""
        if self._kept is None:
            self._kept = asyncio.get_running_loop().create_future()
            self._kept.add_done_callback(_look_at)
        return self._kept

    def _decide(self, facts: Sequence[Fact]) -> list[Order]:
        """Fold facts and plan; after a plan that took long the next one waits, so that people are answered too."""
        before, began = self._scheduler.timing.planned_at, self._breath.begin()
        orders = self._scheduler.handle(self._now(), facts)
        if self._scheduler.timing.planned_at != before:
            self._scheduler.timing.min_pause_s = self._breath.after(began)
        return orders

    def _now(self) -> float:
        """The time; never before what the scheduler has seen."""
        return max(self._clock.now(), self._scheduler.at)

    def _wake(self) -> None:
        wake_at = self._scheduler.wake_at
        if wake_at is not None and self._now() >= wake_at:
            self._handle((Woke(),))

    # ---------------------------------------------------------------------------------------------------- committing
    async def _commit_always(self) -> None:
        """One commit after the other: whatever is folded during one is in the next, and nothing behind the last."""
        while not self._is_closing:
            await self._dirty.wait()
            await self._commit_once()

    async def _commit_once(self) -> None:
        self._dirty.clear()
        orders, self._orders = self._orders, []
        ended, self._ended = self._ended, []
        kept, self._kept = self._kept, None
        self._committing = kept
        self._store.round_off(self._scheduler.at)
        mark, finish = self._store.mark, self._host.cut()
        try:
            await self._make_durable()
            finish()
            self._carry(orders)
            for job in ended:
                self._forget(job)
            if mark.life == self._link.life:
                self._link.acknowledge(mark.heard)
        except Exception as error:
            for asked in (kept, self._promise()):  # whoever asked, or will ask, must not wait for ever
                if asked is not None and not asked.done():
                    asked.set_exception(error)
            raise
        if kept is not None and not kept.done():
            kept.set_result(None)
        if self._since_balance >= max(_RECORDS_PER_BALANCE, len(self._scheduler.jobs)) and self._balancing is None:
            self._balancing = asyncio.create_task(self._keep_balance_aside())

    def _carry(self, orders: Sequence[Order]) -> None:
        """Pass orders on; a job is made known with its first one, so that those that wait cost the executor nothing."""
        for job in dict.fromkeys(order.job for order in orders):
            if job not in self._introduced and job in self._programs:
                self._link.introduce(job, self._programs[job], resume=job not in self._fresh)
                self._introduced.add(job)
                self._fresh.discard(job)
        known = [order for order in orders if order.job in self._introduced]
        if known:
            self._link.carry(known)

    def _forget(self, job: JobId) -> None:
        self._fresh.discard(job)
        if job in self._introduced:
            self._introduced.discard(job)
            self._link.forget(job)

    async def _make_durable(self) -> None:
        try:
            await self._run_commit(self._store.commit)
        except (OSError, sqlite3.Error) as error:
            raise CommitFailed(
                f"the journal cannot be written: {error}. Make room on the disk, then start again."
            ) from error

    def keep_balance(self) -> None:
        """Let the next start begin here; where the disk is full it folds what it would not have to."""
        with contextlib.suppress(OSError, sqlite3.Error):
            self._store.keep_balance(*self._balance())
            self._store.retain(self._retain)

    async def _keep_balance_aside(self) -> None:
        """The same while the daemon goes on: it is written in a thread, and put down with the next commit."""
        kept = self._store.close_books(*self._balance())
        text = None

        def write() -> None:
            nonlocal text
            text = snapshot_text(kept)

        await self._run_commit(write)
        assert text is not None
        self._store.put_down(kept, text, self._retain)
        self._balancing = None
        self._dirty.set()

    def _balance(self) -> tuple[StateSnapshot, dict[JobId, Mapping[str, Any]]]:
        self._since_balance = 0
        jobs = self._scheduler.jobs
        return self._scheduler.state(), {
            job: _details(program, self._notes.get(job), self._host.sized(job))
            for job, program in self._programs.items()
            if job in jobs
        }

    async def _last_commit(self, committing: asyncio.Task[None]) -> None:
        """Make durable what is not yet, unless that is what failed; one that is under way comes to its end."""
        if self._balancing is not None:
            await self._balancing
        self._is_closing = True
        self._dirty.set()
        await committing
        self._is_closing = False
        if self._dirty.is_set():
            await self._commit_once()

    # -------------------------------------------------------------------------------------------------------- ending
    async def _end(self, receiving: asyncio.Task[Report]) -> None:
        """End the executor and hear its last words; what is decided meanwhile is not carried out any more."""
        halting = asyncio.create_task(self._link.stop(checkpoint=True))
        with contextlib.suppress(ExecutorGone):
            while True:
                await self._clock.wait({receiving, halting} if not halting.done() else {receiving}, None)
                if receiving.done():
                    self._hear(receiving.result(), carry=False)
                    receiving = asyncio.create_task(self._link.receive())
        receiving.cancel()
        await halting


def _details(program: Program, note: Mapping[str, Any] | None, sized: Sized | None = None) -> dict[str, Any]:
    """What the store keeps of a job besides its spec."""
    details: dict[str, Any] = {"program": program.as_json()}
    if note:
        details["note"] = dict(note)
    if sized is not None:  # it is said once, in a record that a balance may stand for
        details["sized"] = report_to_json(sized)
    return details


def _look_at(kept: asyncio.Future[None]) -> None:
    """A wish whose user has gone fails in silence: the daemon itself tells why."""
    if not kept.cancelled():
        kept.exception()
