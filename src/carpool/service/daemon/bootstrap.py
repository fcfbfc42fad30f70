"""Composition root of ``carpool serve`` and ``carpool run``: store, scheduler, executor and loop in one folder."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from carpool.backends.executors import LOCAL, ExecutorGroup, ExecutorPort, Introduction, WaitableClock, WallClock
from carpool.backends.fleet import Member, fleet_cluster
from carpool.backends.group_retention import neighbour_lookup
from carpool.backends.job_accounting import JobAccounting
from carpool.backends.job_files import JobFileWriter
from carpool.backends.metric_summary import read_metric_reports
from carpool.backends.online_estimator import OnlineEstimator, initial_speeds
from carpool.backends.profile_learner import ProfileLearner
from carpool.backends.run_folder import RunFolder
from carpool.core.errors import InputError
from carpool.core.host_resources import UNKNOWN, HostResources
from carpool.core.journal import Header
from carpool.core.messages import (
    Assign,
    Fact,
    JobCancelled,
    JobFailed,
    JobFinished,
    LinkMeasured,
    NodeJoined,
    Observer,
    Order,
    PolicyChanged,
    Record,
)
from carpool.core.model import JobId
from carpool.core.policy import Policy
from carpool.core.scheduler import Scheduler
from carpool.jobs.devices import LocalDevice
from carpool.jobs.job_file import ListedJob
from carpool.logs import log_event
from carpool.policies.registry import parse_policy
from carpool.runtime.executor.client import ExecutorOptions
from carpool.runtime.executor.client_protocol import HeldJobStatus
from carpool.runtime.executor.reports import Report
from carpool.service.daemon.halving_control import HalvingControl
from carpool.service.daemon.loop import DaemonLoop, LoopHooks, LoopOptions
from carpool.service.daemon.notifications import JobEnd, Notifier
from carpool.service.daemon.profile_store import ProfileSource, ProfileStore, SharedProfiles
from carpool.service.daemon.read_model import ReadModel
from carpool.service.daemon.record_log import RecordLog
from carpool.service.daemon.recovery import (
    Salvage,
    StateObservers,
    newest_policy,
    reconcile,
    recover_observers,
    recover_scheduler,
)
from carpool.service.daemon.retention import CheckpointRetention
from carpool.service.fleet.executor_access import ExecutorAccess, FleetMember, PersistentExecutor
from carpool.service.fleet.fleet_access import FleetAccess
from carpool.service.fleet.fleet_growth import FleetGrowth, MemberSource
from carpool.service.fleet.link_survey import LinkSurvey
from carpool.service.queries.allocation_history import AllocationHistory
from carpool.service.queries.event_log import EventFeed, EventLog
from carpool.service.queries.present import TimeBase
from carpool.service.store.disk_space import DiskReserve
from carpool.service.store.store import Store

_MANY_RECORDS = 1000  # folded at a start: store a snapshot at once

_log = logging.getLogger(__name__)

MakeClock = Callable[[float, float], WaitableClock]  # of the scheduler's time and the Unix time of instant 0


def calendar_clock(at: float, begun_at: float) -> WaitableClock:
    """A clock that keeps running while the daemon is down."""
    return WallClock(max(at, time.time() - begun_at))


def elapsed_clock(at: float, begun_at: float) -> WaitableClock:
    """A clock that stands still while a run is interrupted."""
    return WallClock(at)


@dataclass(frozen=True, slots=True)
class DaemonOptions:
    """Options of a daemon; the defaults are those of ``carpool serve``."""

    state: Path
    devices: tuple[LocalDevice, ...]
    version: str
    policy: str = ""  # as the user wrote it; empty: the last one in the journal, or the default
    default_policy: str = "carpool"
    fallback_policy: str | None = None  # takes over when a policy fails; empty: raise the failure; None: the default
    find_policy: Callable[[str], Policy] = parse_policy
    options: ExecutorOptions = field(default_factory=ExecutorOptions)
    loop: LoopOptions = field(default_factory=LoopOptions)
    access: ExecutorAccess | None = None  # how the executor is reached; None: by a socket in `state`
    members: tuple[FleetMember, ...] = ()  # the machines; none: this one alone, with `devices` and `access`
    source: MemberSource | None = None  # of machines that come and go while the daemon runs
    profiles: ProfileSource | None = None  # None: shared by all jobs of an entry, in `state`
    clock: MakeClock = calendar_clock
    sync: bool = True  # commits survive a power loss
    notifies: bool = True  # send the notifications that jobs ask for
    checkpoint_days: float = 0.0  # keep checkpoints of ended jobs for this many days; 0: forever
    supplies: HostResources = UNKNOWN  # of this machine
    tell: Callable[[str], None] = lambda words: None  # prints a notice for the operator

    def fleet(self) -> tuple[FleetMember, ...]:
        if self.members:
            return self.members
        access = self.access or PersistentExecutor(self.state / "executor", self.options)
        return (FleetMember(Member(LOCAL, self.devices, self.supplies), access),)


class DaemonInstance:
    """A scheduler with its store, executor and observers, in a folder that it holds from `open` to `close`.

    `start` claims the executor of an earlier daemon, or starts one; `run` schedules until `stop` or the loop's end.
    `observers` see every stored record, and then the new ones.
    """

    def __init__(
        self, options: DaemonOptions, folder: RunFolder, store: Store, observers: Sequence[Observer] = ()
    ) -> None:
        self.options = options
        self.store = store
        self.notices: list[str] = [*store.findings.messages()]  # findings of the start, for the operator
        self._first: list[Fact] = []
        self._salvage = Salvage()
        self.scheduler, estimator, folded = self._recovered_scheduler()
        self.calendar = TimeBase(store.begun_at)
        cluster = self.scheduler.cluster
        learner = ProfileLearner(cluster, options.version)
        self.observers = StateObservers(
            JobAccounting(cluster),
            estimator,
            AllocationHistory(cluster),
            EventLog(EventFeed(store.mark.epoch + 1), self.calendar.unix),
            learner,
            HalvingControl(self._measured, self._tell),
        )
        self._folder = folder
        self.recovered = recover_observers(store, self.scheduler, self.observers, folded, observers, self._salvage)
        self._quarantine_unusable()
        self.observers.events.feed.end_replay()
        self._job_files = JobFileWriter(folder)
        self._profiles = ProfileStore(options.profiles or SharedProfiles(options.state), learner, estimator)
        self._follow_recovered_jobs(learner)
        own: list[Observer] = [store, self.observers, self._job_files, learner, self, RecordLog()]
        for observer in (*own, *observers):
            self.scheduler.add_observer(observer)
        told = self.notices.append
        self._fleet = FleetAccess(options.fleet(), store, self.scheduler, options.options, self._commit, told)
        self.names = self._fleet.names
        self._survey = LinkSurvey(self.scheduler, self._fleet.measure_link, self._apply_link)
        self._over: list[JobId] = []  # ended jobs whose records are not durable yet
        self._notifier = Notifier(options.state, self._tell, pass_env=options.options.pass_env)
        self._retention = CheckpointRetention(
            options.state,
            options.checkpoint_days,
            self.scheduler,
            self.observers.accounting,
            self.calendar,
            self._tell,
        )
        self.clock: WaitableClock
        self.loop: DaemonLoop

    @classmethod
    def open(cls, options: DaemonOptions) -> DaemonInstance:
        """Hold the folder, private to its owner, and recover the state that its journal holds.

        InputError where another daemon holds it or it is the folder of a run, or for an unknown policy.
        """
        if options.policy:
            options.find_policy(options.policy)
        with ExitStack() as undo:
            folder = RunFolder(options.state)
            if folder.exists:
                raise InputError("holds a run", where=str(options.state), way_out="Name another --state.")
            folder.make_private()
            folder.hold(by="daemon")
            undo.callback(folder.let_go)
            reserve = DiskReserve(options.state)
            reserve.hold()  # or, on a full disk, release it for the writes of this start
            options = replace(options, loop=replace(options.loop, reserve=reserve))
            store = Store.open(options.state, cls.header(options), sync=options.sync)
            undo.callback(store.close)
            daemon = cls(options, folder, store)
            undo.pop_all()
            return daemon

    @staticmethod
    def header(options: DaemonOptions) -> Header:
        cluster = fleet_cluster([each.member for each in options.fleet()])
        return Header(options.version, options.policy or options.default_policy, cluster)

    @property
    def devices(self) -> tuple[LocalDevice, ...]:
        """The devices, numbered as the cluster numbers them."""
        return tuple(device for node in self._fleet.nodes.values() for device in node.devices)

    @property
    def read_model(self) -> ReadModel:
        accounting, estimator, allocations, events, *_ = self.observers
        return ReadModel(
            loop=self.loop,
            scheduler=self.scheduler,
            accounting=accounting,
            estimates=estimator,
            allocations=allocations,
            events=events,
            programs=self.recovered.programs,
            total_steps=estimator.total,
            state=self.options.state,
            names=self.names,
            calendar=self.calendar,
            now=self.clock.now,
            version=self.options.version,
            policy=lambda: self.policy_text,
        )

    @property
    def policy_text(self) -> str:
        """The policy as it was written; one that takes over with the first fact counts already."""
        wanted = [fact.policy for fact in self._first if isinstance(fact, PolicyChanged)]
        return next(iter(wanted), self.scheduler.policy_text or self.store.header.policy)

    def _recovered_scheduler(self) -> tuple[Scheduler, OnlineEstimator, int]:
        options, snapshot = self.options, self.store.snapshot
        cluster = self.store.header.cluster if snapshot is None else snapshot.state.cluster
        estimator = OnlineEstimator(
            cluster, initial_speeds([device for each in options.fleet() for device in each.member.devices])
        )
        fallback = options.default_policy if options.fallback_policy is None else options.fallback_policy
        scheduler = Scheduler(
            cluster, self._policy(), estimator=estimator, find_policy=options.find_policy, fallback=fallback
        )
        estimator.neighbours_of = neighbour_lookup(scheduler)
        folded = recover_scheduler(self.store, scheduler, self._salvage)
        estimator.cluster = scheduler.cluster
        log_event(_log, "store_opened", folder=str(self.store.folder), records=folded, jobs=len(scheduler.jobs))
        for finding in self.notices:
            log_event(_log, "store_finding", level=logging.WARNING, finding=finding)
        return scheduler, estimator, folded

    def _quarantine_unusable(self) -> None:
        """Fail the jobs with unusable values in the journal, and notify the operator."""
        self._first += self._salvage.failures(self.scheduler.jobs)
        for finding in self._salvage.messages():
            log_event(_log, "store_finding", level=logging.WARNING, finding=finding)
            self.notices.append(finding)

    def _policy(self) -> Policy:
        """The last policy in the journal; if another one is requested or it cannot be loaded, a fact replaces it."""
        text, wanted = newest_policy(self.store), self.options.policy
        try:
            policy = self.options.find_policy(text)
        except InputError as error:
            wanted = wanted or self.options.default_policy
            self.notices.append(f"The policy {text!r} cannot be loaded ({error}); {wanted!r} takes over.")
            policy = self.options.find_policy(wanted)
        if wanted and wanted != text:
            self._first.append(PolicyChanged(wanted))
        return policy

    def _measured(self, job: JobId) -> list[tuple[int, Mapping[str, float]]]:
        """The metrics of a job that was submitted before the first stored record, by step."""
        reports = read_metric_reports(self._folder.job(job) / "metrics.jsonl")
        return [(report.step, report.metrics) for report in reports if report.metrics]

    def _follow_recovered_jobs(self, learner: ProfileLearner) -> None:
        jobs, programs = self.scheduler.jobs, self.recovered.programs
        self._profiles.introduce(ListedJob(job.spec, programs[job.id]) for job in jobs.values() if job.id in programs)
        learner.follow(jobs)

    async def start(self) -> None:
        started = await self._fleet.start()
        self._make_loop({name: each.port for name, each in started.items()})
        unfit = [name for name, each in started.items() if each.is_unfit]
        if unfit:
            self.notices.append("The executor of the previous daemon does not fit; its jobs resume from checkpoints.")
            await self.loop.end_executors(unfit)
            for name in unfit:
                self._executors.replace(name, await self._fleet.start_executor(name))
        self._resend({name: each.inventory.jobs for name, each in started.items() if each.inventory is not None})
        self._first += [*self._lost_programs(), *self._fleet.lose_departed()]
        for name, each in started.items():
            if each.is_absent:
                self._first += self._fleet.lose(name)
            elif each.inventory is None:
                self._first += self._rejoin(name)

    async def run(self, jobs: Sequence[ListedJob] = (), facts: Sequence[Fact] = ()) -> None:
        """Fold facts, submit jobs, and schedule until `stop` or the loop's end; then all is durable."""
        if self.recovered.folded > _MANY_RECORDS:
            self.loop.store_snapshot()
        for job, account in self.observers.accounting.accounts.items():
            if account.phase.is_over:
                self._announce(job)
        self.loop.proceed()
        first, self._first = self._first, []
        beside = [asyncio.create_task(self._retention.run())]
        if self.options.source is not None:
            growth = FleetGrowth(self.options.source, self._fleet, self.loop, self._executors, self.scheduler)
            beside.append(asyncio.create_task(growth.run()))
        if self._fleet.measures_links or self.options.source is not None:
            beside.append(asyncio.create_task(self._survey.run()))
        try:
            await self.loop.run([*first, *facts], jobs)
        finally:
            for task in beside:
                task.cancel()
            await self._notifier.close()
            for job in self.scheduler.jobs:
                self._profiles.save(job, self.recovered.programs.get(job))
        self.loop.store_snapshot()
        self._fleet.close()

    @property
    def leaves_running(self) -> bool:
        """Whether it was stopped with its executors left running for the next daemon."""
        return self.loop.leaves_running

    def stop(self, *, leave_running: bool = False) -> None:
        self.loop.stop(leave_running=leave_running)

    def close(self) -> None:
        self.observers.events.feed.close()
        self.store.close()
        self._folder.let_go()

    def record(self, record: Record) -> None:
        for fact in record.facts:
            if isinstance(fact, NodeJoined | LinkMeasured):
                self.observers.estimator.cluster = self.observers.allocations.cluster = self.scheduler.cluster
                if isinstance(fact, NodeJoined):
                    self._survey.joined(fact.name)
            elif isinstance(fact, JobFinished | JobFailed | JobCancelled):
                self._over.append(fact.job)
            elif isinstance(fact, PolicyChanged) and fact.fault:
                self.options.tell(f"{fact.fault}; {fact.policy} takes over")

    def _make_loop(self, ports: Mapping[str, ExecutorPort]) -> None:
        self.clock = self.options.clock(self.scheduler.at, self.store.begun_at)
        self._executors = ExecutorGroup(ports, self._fleet.owner)
        hooks = LoopHooks(
            before_submit=self._profiles.introduce,
            on_submit=self._on_submit,
            on_report=self._on_report,
            sized=self.observers.learner.sized,
            follow_up=self.observers.halving.follow_up,
            before_commit=self._before_commit,
            tell_operator=self.options.tell,
            renew=self._fleet.renew,
        )
        programs, notes, jobs = self.recovered.programs, self.recovered.notes, self.scheduler.jobs
        self.loop = DaemonLoop(
            self.scheduler,
            self.store,
            self._executors,
            self.clock,
            hooks,
            self.options.loop,
            programs={job: programs[job] for job in jobs if job in programs},
            notes={job: notes[job] for job in jobs if job in notes},
        )
        self.loop.hold_reserve()

    def _tell(self, job: JobId, words: str) -> None:
        self.loop.tell(job, words)

    async def _apply_link(self, fact: LinkMeasured) -> None:
        await self.loop.apply(fact)

    def _on_submit(self, jobs: Sequence[ListedJob]) -> None:
        self.recovered.programs.update({spec.id: program for spec, program in jobs})

    def _on_report(self, at: float, report: Report) -> None:
        self.observers.take(at, report)
        self.observers.events.on_report(at, report)
        self._job_files.take(at, report)

    def _before_commit(self) -> Callable[[], None]:
        write = self._job_files.cut()
        over, self._over = self._over, []

        def finish() -> None:
            write()
            for job in over:
                self._profiles.close(job, self.recovered.programs.get(job))
                self._announce(job)

        return finish

    def _announce(self, job: JobId) -> None:
        program, account = self.recovered.programs.get(job), self.observers.accounting.accounts[job]
        if self.options.notifies and program is not None and program.notify:
            digest = None if account.outcome is None else account.outcome.digest
            ending = JobEnd(job, account.spec.user, account.phase, account.error, digest)
            self._notifier.announce(ending, program.notify, program.folder)

    async def _commit(self) -> None:
        self.store.flush_reports(self.scheduler.at)
        await self.options.loop.commit(self.store.commit)  # waits for a commit under way, without blocking the loop

    def _resend(self, held: Mapping[str, Mapping[JobId, HeldJobStatus]]) -> None:
        """Send what executors may have missed; orders of new executors follow from the loss of their nodes."""
        if not held:
            return
        programs, executors = self.recovered.programs, self._executors
        missed = reconcile(self.scheduler.jobs, held)
        for name, statuses in held.items():
            executors.adopt(name, [job for job in statuses if missed.holders.get(job) == name])
        for name, job in missed.forget:
            executors[name].forget(job)
        introductions = {job: Introduction(program, resume=True) for job, program in programs.items()}
        executors.carry([order for order in missed.orders if self._is_held(order, held)], introductions)

    def _is_held(self, order: Order, held: Mapping[str, object]) -> bool:
        """Whether all executors of an order are in the journal."""
        devices = order.allocation.devices() if isinstance(order, Assign) else ()
        return order.job in self.recovered.programs and all(self._fleet.owner(device) in held for device in devices)

    def _rejoin(self, name: str) -> list[Fact]:
        """Facts for a member with a new executor: lost, then rejoined; none if a new journal already lists its node."""
        is_new = not self.observers.accounting.accounts
        node = self._fleet.nodes[name].name
        if is_new and node in {known.name for known in self.scheduler.cluster.nodes}:
            return []
        return self._fleet.rejoin(name)

    def _lost_programs(self) -> list[Fact]:
        return [
            JobFailed(job.id, job.generation, "its program was lost with a damaged record of the journal")
            for job in self.scheduler.jobs.values()
            if job.id not in self.recovered.programs
        ]
