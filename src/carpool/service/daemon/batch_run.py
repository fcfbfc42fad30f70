"""Batch run: runs the jobs of one file to their end with the daemon's loop, in a run folder that can be resumed."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Self

from carpool.backends.job_accounting import JobAccounting
from carpool.backends.online_estimator import OnlineEstimator
from carpool.backends.run_folder import RunFolder, RunSettings
from carpool.core.errors import InputError
from carpool.core.host_resources import UNKNOWN, HostResources
from carpool.core.messages import JobCancelled, Observer
from carpool.core.metrics import Metrics
from carpool.core.model import JobId, JobSpec
from carpool.core.policy import Policy
from carpool.core.scheduler import Scheduler
from carpool.jobs.devices import LocalDevice
from carpool.jobs.job_file import ListedJob
from carpool.policies.registry import parse_policy
from carpool.predictors.profiles.rate_model import ProfileRateModel
from carpool.runtime.executor.client import ExecutorOptions
from carpool.service.daemon.bootstrap import DaemonInstance, DaemonOptions, MakeClock, elapsed_clock
from carpool.service.daemon.group_commit import commit_inline
from carpool.service.daemon.loop import EndWhenDone, LoopEnd, LoopOptions
from carpool.service.daemon.profile_store import RunProfiles
from carpool.service.fleet.executor_access import ChildExecutor, FleetMember, StartExecutor
from carpool.service.fleet.fleet_growth import MemberSource
from carpool.service.store.journal_file import JournalFile, import_legacy_journal
from carpool.service.store.store import Store


class RunEnd(StrEnum):
    """How a run ended."""

    DONE = "done"  # every job is over
    INTERRUPTED = "interrupted"  # stopped with checkpoints: it can be resumed


@dataclass(frozen=True, slots=True)
class RunRequest:
    """The request for a run."""

    name: str  # of the job file
    jobs: tuple[ListedJob, ...]
    devices: tuple[LocalDevice, ...]
    policy: str  # as the user wrote it
    version: str
    supplies: HostResources = UNKNOWN  # of this machine
    find_policy: Callable[[str], Policy] = parse_policy
    profiles: Mapping[JobId, ProfileRateModel] = field(default_factory=dict)  # known profiles of the jobs
    journal: Path | None = None  # additional file for the journal
    observers: tuple[Observer, ...] = ()
    members: tuple[FleetMember, ...] = ()  # the machines; none: this one alone, with `devices`
    source: MemberSource | None = None  # of machines that come and go while it runs
    options: ExecutorOptions | None = None  # of the members' executors
    tell: Callable[[str], None] = lambda words: None  # prints a notice for the user


class BatchRun:
    """One execution of a run: a `DaemonInstance` whose executor is a child and whose loop ends with its jobs.

    The folder is held from `open` to `close`. Nothing is written to it before the executor has started.
    """

    def __init__(
        self,
        request: RunRequest,
        folder: RunFolder,
        daemon: DaemonInstance,
        profiles: RunProfiles,
        metrics: Metrics,
        closing: ExitStack,
    ) -> None:
        self.request = request
        self.folder = folder
        self.metrics = metrics
        self.has_begun = False  # the executor has started
        self.is_interrupted = False
        self._daemon = daemon
        self._profiles = profiles
        self._closing = closing
        self._starting: asyncio.Future[None] | None = None
        before = folder.settings() if folder.exists else None
        self.names: dict[int, str] = {**({} if before is None else before.names), **daemon.names}
        if before is not None:
            over = frozenset(spec.id for spec, _ in request.jobs if daemon.scheduler.outcome(spec.id) is not None)
            check_jobs_unchanged(before.jobs, request.jobs, over)

    @classmethod
    def open(
        cls,
        request: RunRequest,
        folder: RunFolder,
        start: StartExecutor,
        clock: MakeClock = elapsed_clock,
        end: LoopEnd | None = None,
    ) -> Self:
        """Lock the folder and recover the records of an earlier execution.

        InputError where another run holds it, or where a job is not the one that was begun.
        """
        with ExitStack() as undo:
            folder.hold()
            undo.callback(folder.let_go)
            import_legacy_journal(folder)
            profiles = RunProfiles(folder, request.profiles)
            options = _options(
                request,
                folder,
                ChildExecutor(start),
                profiles,
                clock,
                end or EndWhenDone(may_grow=request.source is not None),
            )
            store = Store.open(folder.path, DaemonInstance.header(options), sync=options.sync)
            undo.callback(store.close)
            metrics = Metrics(store.header.cluster)
            observers: list[Observer] = [metrics, *request.observers]
            closing = ExitStack()
            if request.journal is not None:
                journal = JournalFile(request.journal, store.header)
                observers.append(journal)
                closing.callback(journal.close)
            daemon = DaemonInstance(options, folder, store, observers)
            closing.callback(daemon.close)
            run = cls(request, folder, daemon, profiles, metrics, closing)
            undo.pop_all()
            return run

    @property
    def accounting(self) -> JobAccounting:
        return self._daemon.observers.accounting

    @property
    def estimator(self) -> OnlineEstimator:
        return self._daemon.observers.estimator

    @property
    def scheduler(self) -> Scheduler:
        return self._daemon.scheduler

    @property
    def devices(self) -> tuple[LocalDevice, ...]:
        return self._daemon.devices

    @property
    def notices(self) -> list[str]:
        return self._daemon.notices

    async def run(self) -> RunEnd:
        is_started = await self._start()
        request = self.request
        self.folder.begin(
            RunSettings(request.name, request.version, request.policy, self.devices, request.jobs, self.names)
        )
        self._profiles.write_beliefs()
        if not is_started:
            return RunEnd.INTERRUPTED
        self.has_begun = True
        listed = {spec.id for spec, _ in self.request.jobs}
        dropped = [JobCancelled(job) for job in self.scheduler.jobs if job not in listed]
        await self._daemon.run(self._fresh(), dropped)
        return RunEnd.INTERRUPTED if self.is_interrupted and self.scheduler.jobs else RunEnd.DONE

    def _fresh(self) -> list[ListedJob]:
        return [job for job in self.request.jobs if not self.scheduler.has_seen(job.spec.id)]

    async def _start(self) -> bool:
        """Start the executor, which takes seconds to import torch; False when interrupted meanwhile."""
        self._starting = asyncio.ensure_future(self._daemon.start())
        try:
            await self._starting
        except asyncio.CancelledError:
            if not self.is_interrupted:
                raise
            return False
        if self.is_interrupted:  # interrupted just as it had started
            await self._daemon.loop.end_executors(checkpoint=False)
            return False
        return True

    def interrupt(self) -> None:
        """Stop with checkpoints; the second time without. Before the executor has started, give up its start."""
        if self.has_begun:
            (self._daemon.loop.abort if self.is_interrupted else self._daemon.stop)()
        elif self._starting is not None:
            self._starting.cancel()
        self.is_interrupted = True

    def commands_without_checkpoints(self) -> list[JobId]:
        """Running commands that would start from the beginning after an end of this run."""
        running = self.scheduler.jobs
        return [
            spec.id
            for spec, program in self.request.jobs
            if spec.id in running and running[spec.id].desired is not None and program.command and not program.resumable
        ]

    def close(self) -> None:
        self._closing.close()


def _options(
    request: RunRequest,
    folder: RunFolder,
    access: ChildExecutor,
    profiles: RunProfiles,
    clock: MakeClock,
    end: LoopEnd,
) -> DaemonOptions:
    loop = LoopOptions(
        commit=commit_inline,
        retain=sys.maxsize,
        planning_share=1.0,
        introduce_early=True,
        end=end,
    )
    return DaemonOptions(
        folder.path,
        request.devices,
        request.version,
        request.policy,
        fallback_policy="",
        find_policy=request.find_policy,
        loop=loop,
        access=access,
        profiles=profiles,
        clock=clock,
        members=request.members,
        source=request.source,
        options=request.options or ExecutorOptions(),
        sync=False,
        notifies=False,
        supplies=request.supplies,
        tell=request.tell,
    )


def check_jobs_unchanged(before: Sequence[ListedJob], now: Sequence[ListedJob], over: frozenset[JobId]) -> None:
    """InputError where a job that still has to run differs from the one that was begun."""
    begun = {spec.id: (spec, program) for spec, program in before}
    for spec, program in now:
        if spec.id in over or spec.id not in begun:
            continue
        old_spec, old_program = begun[spec.id]
        if program != old_program or _fixed(spec) != _fixed(old_spec):
            raise InputError(
                f"job {spec.id!r} was changed since the run began",
                way_out="Restore it, rename it, or begin a new run without --resume.",
            )


def _fixed(spec: JobSpec) -> JobSpec:
    """The part of a spec that may not change when a run is resumed."""
    return replace(spec, weight=1.0, priority=0, deadline_s=0.0, after=(), array="", at_most=0, params=())
