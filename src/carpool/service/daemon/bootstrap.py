"""Daemon bootstrap: opens the state folder, recovers the scheduler, claims an executor, and runs the loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from carpool.backends.job_accounting import JobAccounting
from carpool.backends.job_files import JobFileWriter
from carpool.backends.local import ExecutorGone, WallClock
from carpool.backends.local_run import RejoinedNode, initial_speeds, rejoined_node
from carpool.backends.online_estimator import OnlineEstimator, colocation_check
from carpool.backends.profile_learner import ProfileLearner
from carpool.backends.run_folder import RunFolder
from carpool.core.errors import CarpoolError, InputError
from carpool.core.host_resources import UNKNOWN, HostResources
from carpool.core.journal import Header
from carpool.core.messages import (
    Fact,
    JobCancelled,
    JobFailed,
    JobFinished,
    NodeJoined,
    NodeLost,
    PolicyChanged,
    Record,
)
from carpool.core.model import JobId
from carpool.core.policy import Policy
from carpool.core.scheduler import Scheduler
from carpool.jobs.devices import LocalDevice, as_cluster
from carpool.jobs.job_file import ListedJob
from carpool.policies.registry import parse_policy
from carpool.runtime.executor.client import Claim, ClaimRefused, ExecutorClient, ExecutorOptions, ExecutorSocket
from carpool.runtime.executor.reports import Report
from carpool.service.daemon.loop import Commit, DaemonLoop, LoopHooks
from carpool.service.daemon.notifications import JobEnd, Notifier
from carpool.service.daemon.profile_store import ProfileStore
from carpool.service.daemon.read_model import ReadModel
from carpool.service.daemon.recovery import (
    StateObservers,
    is_ahead,
    newest_policy,
    reconcile,
    recover_followers,
    recover_scheduler,
)
from carpool.service.daemon.retention import CheckpointRetention
from carpool.service.queries.allocation_history import AllocationHistory
from carpool.service.queries.event_log import EventFeed, EventLog
from carpool.service.queries.present import TimeBase
from carpool.service.store.store import Store

_MOST_DEATHS = 5  # of executors, within
_DEATHS_S = 60.0
_SILENCE_S = 60.0  # of an executor: then it hangs, is ended, and another takes its place
_MANY_RECORDS = 1000  # folded at a start: the next one should begin here


@dataclass(frozen=True, slots=True)
class DaemonOptions:
    """What a daemon is started with."""

    state: Path
    devices: tuple[LocalDevice, ...]
    version: str
    policy: str = ""  # as the user wrote it; empty: the one that the journal ends with, or the default
    default_policy: str = "carpool"
    options: ExecutorOptions = field(default_factory=ExecutorOptions)
    retain: int = 100_000  # records that are kept when a balance stands for them: stories and figures go back so far
    checkpoint_days: float = 0.0  # that checkpoints of jobs stay that are over; 0: always
    commit: Commit = asyncio.to_thread  # how the store's commits are run
    supplies: HostResources = UNKNOWN  # of this machine
    tell: Callable[[str], None] = lambda words: None  # what whoever runs it should know, as it happens


class DaemonInstance:
    """One daemon and all that belongs to it; the folder is held from `open` to `close`.

    `start` claims the executor that an earlier daemon left at work, or starts one; `run` goes on until `stop`. What
    people ask goes through a `SchedulerService` on `premises`.
    """

    def __init__(self, setup: DaemonOptions, folder: RunFolder, store: Store) -> None:
        self.setup = setup
        self.store = store
        self.told: list[str] = [*store.findings.tell()]  # what was found at the start, for people
        self._first: list[Fact] = []
        policy = self._policy()
        balance = store.balance
        cluster = store.header.cluster if balance is None else balance.balance.cluster
        live = OnlineEstimator(cluster, initial_speeds(setup.devices))
        self.scheduler = Scheduler(
            cluster, policy, estimator=live, find_policy=parse_policy, fallback=setup.default_policy
        )
        live.has_company = colocation_check(self.scheduler)
        folded = recover_scheduler(store, self.scheduler)
        live.cluster = self.scheduler.cluster
        self.calendar = TimeBase(store.begun_at)
        chronicle = EventLog(EventFeed(store.mark.epoch + 1), self.calendar.unix)
        lessons = ProfileLearner(self.scheduler.cluster, setup.version)
        self.followers = StateObservers(
            JobAccounting(), live, AllocationHistory(self.scheduler.cluster), chronicle, lessons
        )
        self.recovered = recover_followers(store, self.scheduler, self.followers, folded)
        chronicle.feed.end_replay()
        self._folder = folder
        self._scribe = JobFileWriter(folder)
        self._knowledge = ProfileStore(setup.state, lessons, live)
        self._knowledge.go_on_with(self.scheduler.jobs, self.recovered.programs)
        for observer in (store, self.followers, self._scribe, lessons, self):
            self.scheduler.add_observer(observer)
        self._door = ExecutorSocket(setup.state / "executor")
        self._back = rejoined_node(self.scheduler.cluster, setup.devices, setup.supplies)
        self.names = {device.id: device.name for device in self._back.devices}
        self.clock = WallClock(max(self.scheduler.at, time.time() - store.begun_at))
        self._deaths: list[float] = []
        self._over: list[JobId] = []  # their records not yet durable
        self._notices = Notifier(setup.state, self._tell)
        days, ledger = setup.checkpoint_days, self.followers.ledger
        self._retention = CheckpointRetention(setup.state, days, self.scheduler, ledger, self.calendar, self._tell)
        self.daemon: DaemonLoop

    @classmethod
    def open(cls, setup: DaemonOptions) -> DaemonInstance:
        """Hold the folder and bring everything to where its journal ends.

        InputError where another daemon holds it, or where there is no such policy: a new journal would begin with it.
        """
        if setup.policy:
            parse_policy(setup.policy)
        folder = RunFolder(setup.state)
        folder.make_private()
        folder.hold(by="daemon")
        try:
            store = Store.open(setup.state, cls.header(setup))
            try:
                return cls(setup, folder, store)
            except BaseException:
                store.close()
                raise
        except BaseException:
            folder.let_go()
            raise

    @staticmethod
    def header(setup: DaemonOptions) -> Header:
        """What a new journal is about."""
        return Header(setup.version, setup.policy or setup.default_policy, as_cluster(setup.devices, setup.supplies))

    @property
    def premises(self) -> ReadModel:
        """What a clerk looks things up in."""
        ledger, live, spans, chronicle, _ = self.followers
        return ReadModel(
            daemon=self.daemon,
            scheduler=self.scheduler,
            ledger=ledger,
            estimates=live,
            spans=spans,
            chronicle=chronicle,
            programs=self.recovered.programs,
            total=live.total,
            state=self.setup.state,
            names=self.names,
            calendar=self.calendar,
            now=self.clock.now,
            version=self.setup.version,
            policy=lambda: self.policy_text,
        )

    @property
    def policy_text(self) -> str:
        """The policy that decides, or will with the first fact, as it was written."""
        wanted = [fact.policy for fact in self._first if isinstance(fact, PolicyChanged)]
        return next(iter(wanted), self.scheduler.policy_text or self.store.header.policy)

    def _policy(self) -> Policy:
        """The policy that decided last; where another one is wanted, or that one is gone, a fact says so."""
        text, wanted = newest_policy(self.store), self.setup.policy
        try:
            policy = parse_policy(text)
        except InputError as error:
            wanted = wanted or self.setup.default_policy
            self.told.append(f"The policy {text!r} cannot be had any more ({error}); {wanted!r} decides from here on.")
            policy = parse_policy(wanted)
        if wanted and wanted != text:
            self._first.append(PolicyChanged(wanted))
        return policy

    # ------------------------------------------------------------------------------------------------------- starting
    async def start(self) -> None:
        """Have an executor: the one that was left at work, or a new one; nothing goes on before `run`."""
        link = await self._found()
        if link is not None and self._fits(link):
            is_known = link.life == self.store.mark.life
            self.daemon = self._daemon(link, self._tell_again(link) if is_known else ())
            self._first += [*self._lost_programs(), *([] if is_known else self._return())]
            return
        if link is not None:
            self.told.append("The executor that was left at work does not fit any more; its jobs go on from the disk.")
            self.daemon = self._daemon(link)
            await self.daemon.let_end()
            fresh = await self._started()
            self.daemon.go_on_with(fresh)
        else:
            self.daemon = self._daemon(await self._started())
        self._first += [*self._lost_programs(), *self._return()]

    def _fits(self, link: ExecutorClient) -> bool:
        """Whether an executor has the devices that are asked for, and has heard nothing that the books do not know.

        One of which the books know nothing was started by a daemon that died before it could say what became of the
        executor before: it has no jobs yet.
        """
        found, is_whole = link.inventory, not self.store.findings.lost
        is_known = link.life == self.store.mark.life or not found.jobs
        is_behind = is_known and not is_ahead(self.scheduler.jobs, found.jobs)
        return is_whole and is_behind and found.devices == self._back.devices

    async def run(self) -> None:
        """Go on until `stop`; afterwards all is durable, and the next start begins here."""
        if self.recovered.folded > _MANY_RECORDS:
            self.daemon.keep_balance()
        for job, account in self.followers.ledger.accounts.items():
            if account.phase.is_over:
                self._announce(job)
        self.daemon.proceed()
        first, self._first = self._first, []
        clearing = asyncio.create_task(self._retention.look_always())
        try:
            await self.daemon.run(first)
        finally:
            clearing.cancel()
            await self._notices.close()
        for job in self.scheduler.jobs:
            self._knowledge.keep(job, self.recovered.programs.get(job))
        self.daemon.keep_balance()
        if not self._door.is_answered:
            self._door.remove()

    def stop(self, *, leave_running: bool = False) -> None:
        """Halt all jobs with checkpoints and end; or leave them at work for the next daemon."""
        self.daemon.stop(leave_running=leave_running)

    def close(self) -> None:
        """Let go of the folder."""
        self.followers.chronicle.feed.close()
        self.store.close()
        self._folder.let_go()

    def record(self, record: Record) -> None:
        """See devices come, and jobs go."""
        for fact in record.facts:
            if isinstance(fact, NodeJoined):
                self.followers.live.cluster = self.followers.spans.cluster = self.scheduler.cluster
            elif isinstance(fact, JobFinished | JobFailed | JobCancelled):
                self._over.append(fact.job)
            elif isinstance(fact, PolicyChanged) and fact.fault:
                self.setup.tell(f"{fact.fault}; {fact.policy} decides from here on")

    def _daemon(self, link: ExecutorClient, introduced: Collection[JobId] = ()) -> DaemonLoop:
        known = self.recovered
        jobs = self.scheduler.jobs
        return DaemonLoop(
            self.scheduler,
            self.store,
            link,
            self.clock,
            LoopHooks(
                expect=self._knowledge.introduce,
                accept=self._accept,
                take=self._take,
                sized=self.followers.lessons.sized,
                cut=self._cut,
                renew=self._renew,
            ),
            programs={job: known.programs[job] for job in jobs if job in known.programs},
            notes={job: known.notes[job] for job in jobs if job in known.notes},
            introduced=introduced,
            retain=self.setup.retain,
            commit=self.setup.commit,
        )

    def _tell(self, job: JobId, words: str) -> None:
        self.daemon.tell(job, words)

    def _accept(self, jobs: Sequence[ListedJob]) -> None:
        self.recovered.programs.update({spec.id: program for spec, program in jobs})

    def _take(self, at: float, report: Report) -> None:
        self.followers.take(at, report)
        self.followers.chronicle.on_report(at, report)
        self._scribe.take(at, report)

    def _cut(self) -> Callable[[], None]:
        write = self._scribe.cut()
        over, self._over = self._over, []

        def finish() -> None:
            write()
            for job in over:
                self._knowledge.close(job, self.recovered.programs.get(job))
                self._announce(job)

        return finish

    def _announce(self, job: JobId) -> None:
        """Tell whoever wanted to know that a job is over."""
        program, account = self.recovered.programs.get(job), self.followers.ledger.accounts[job]
        if program is not None and program.notify:
            digest = None if account.outcome is None else account.outcome.digest
            ending = JobEnd(job, account.spec.user, account.phase, account.error, digest)
            self._notices.announce(ending, program.notify, program.folder)

    # ------------------------------------------------------------------------------------------------------ executors
    async def _found(self) -> ExecutorClient | None:
        """The executor that an earlier daemon left, claimed; one that does not answer is ended."""
        while (end := self._door.connect()) is not None:
            try:
                return await ExecutorClient.claim(end, await self._claim())
            except (
                ClaimRefused
            ) as refused:  # the newest epoch was lost with its record; we hold the folder, so it is ours
                self.store.mark = self.store.mark._replace(epoch=refused.epoch)
            except CarpoolError as error:
                self.told.append(f"The executor that was left at work did not answer ({error}); it was ended.")
                await self._door.kill_executor()
        return None

    async def _started(self) -> ExecutorClient:
        end, process = self._door.start_executor(self.setup.options.environment)
        try:
            return await ExecutorClient.claim(end, await self._claim(), process)
        except CarpoolError as error:
            raise CarpoolError(f"{error} {self._door.log_tail}") from error

    async def _claim(self) -> Claim:
        """A claim of a new epoch, which is on the disk before anybody hears of it."""
        mark = self.store.mark
        self.store.mark = mark._replace(epoch=mark.epoch + 1)
        self.store.round_off(self.scheduler.at)
        await self.setup.commit(self.store.commit)  # a commit may be under way: this one waits, and holds nobody up
        options = replace(self.setup.options, on_orphan="wait")
        return Claim(self._back.devices, self.setup.state, options, mark.epoch + 1, mark.life, mark.heard, _SILENCE_S)

    async def _renew(self, reason: str) -> tuple[ExecutorClient, Sequence[Fact]]:
        """Another executor for one that is gone; not again and again."""
        now = time.monotonic()
        self._deaths = [*(each for each in self._deaths if now - each < _DEATHS_S), now]
        if len(self._deaths) > _MOST_DEATHS:
            raise ExecutorGone(f"{len(self._deaths)} executors ended within {_DEATHS_S:.0f} s; the last one: {reason}")
        self._back = rejoined_node(self.scheduler.cluster, self.setup.devices, self.setup.supplies)
        return await self._started(), self._return()

    def _tell_again(self, link: ExecutorClient) -> set[JobId]:
        """Say what the executor may not have heard; the jobs it knows then."""
        programs = self.recovered.programs
        again = reconcile(self.scheduler.jobs, link.inventory.jobs)
        introduced = [job for job in again.introduce if job in programs]
        for job in introduced:
            link.introduce(job, programs[job], resume=True)
        for job in again.forget:
            link.forget(job)
        link.carry([order for order in again.orders if order.job in programs])
        return {*link.inventory.jobs, *introduced} - set(again.forget)

    # ---------------------------------------------------------------------------------------------------------- facts
    def _return(self) -> list[Fact]:
        """The machine went away, with all that ran on it, and came back; a new journal knows it already."""
        scheduler, back = self.scheduler, self._back
        if not self.followers.ledger.accounts and back.name in {node.name for node in scheduler.cluster.nodes}:
            return []
        return _facts_of(scheduler, back)

    def _lost_programs(self) -> list[Fact]:
        """Jobs of which nobody knows any more what they run."""
        return [
            JobFailed(job.id, job.generation, "what it runs was lost with a record of the journal")
            for job in self.scheduler.jobs.values()
            if job.id not in self.recovered.programs
        ]


def _facts_of(scheduler: Scheduler, back: RejoinedNode) -> list[Fact]:
    lost = scheduler.snapshot().occupancy.lost
    gone: list[Fact] = [NodeLost(node.id) for node in scheduler.cluster.nodes if node.id not in lost]
    return [*gone, back.fact()]
