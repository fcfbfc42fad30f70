"""Local run: builds or resumes one run from jobs, devices, policy and run folder."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from carpool.backends.job_accounting import JobAccounting
from carpool.backends.job_files import JobFileWriter
from carpool.backends.local import ExecutorPort, LocalBackend, RunEnd, WaitableClock, WallClock
from carpool.backends.online_estimator import OnlineEstimator, colocation_check
from carpool.backends.profile_learner import ProfileLearner
from carpool.backends.run_folder import BELIEVED, PROFILE, JournalFile, RunFolder, RunSettings, read_journal_file
from carpool.core.errors import InputError
from carpool.core.host_resources import UNKNOWN, HostResources
from carpool.core.journal import Header
from carpool.core.messages import Fact, JobCancelled, JobSubmitted, NodeJoined, NodeLost, Observer, Record
from carpool.core.metrics import Metrics
from carpool.core.model import JobId, JobSpec, Kind
from carpool.core.policy import Policy
from carpool.core.scheduler import Scheduler
from carpool.core.topology import Cluster, Node
from carpool.jobs.devices import NODE_NAME, LocalDevice, as_cluster
from carpool.jobs.job_file import ListedJob
from carpool.predictors.profiles.profile import Profile, write_profile
from carpool.predictors.profiles.rate_model import ProfileRateModel
from carpool.runtime.executor.reports import Report

Banks = tuple[tuple[str, int, int], ...]  # (kind, number of devices, memory of each)


class RejoinedNode(NamedTuple):
    """The machine as it comes back: under which name, with what, its devices numbered as the cluster numbers them."""

    name: str
    banks: Banks
    devices: tuple[LocalDevice, ...]
    supplies: HostResources = UNKNOWN

    def fact(self) -> NodeJoined:
        """That it has come back."""
        return NodeJoined(self.name, self.banks, self.supplies if any(self.supplies) else ())


def check_jobs_unchanged(before: Sequence[ListedJob], now: Sequence[ListedJob], over: frozenset[JobId]) -> None:
    """InputError where a job that still has to run is not the one that was begun."""
    begun = {spec.id: (spec, program) for spec, program in before}
    for spec, program in now:
        if spec.id in over or spec.id not in begun:
            continue
        old_spec, old_program = begun[spec.id]
        if program != old_program or _lasting(spec) != _lasting(old_spec):
            raise InputError(
                f"job {spec.id!r} is not what it was when the run began",
                way_out="Put it back as it was, give it another name, or begin a new run without --resume.",
            )


def _lasting(spec: JobSpec) -> JobSpec:
    """What may not change of a job: not how it stands to others, nor its deadline, which comes nearer by itself."""
    return replace(spec, weight=1.0, priority=0, deadline_s=0.0, after=(), array="", at_most=0)


def facts_of_rejoin(scheduler: Scheduler, jobs: Sequence[ListedJob], back: RejoinedNode) -> list[Fact]:
    """What has happened since the last record: the machine went away and came back, jobs were dropped and added."""
    lost = scheduler.snapshot().occupancy.lost
    facts: list[Fact] = [NodeLost(node.id) for node in scheduler.cluster.nodes if node.id not in lost]
    listed = {spec.id for spec, _ in jobs}
    facts += [JobCancelled(job) for job in scheduler.jobs if job not in listed]
    facts.append(back.fact())
    facts += [
        JobSubmitted(spec) for spec, _ in jobs if spec.id not in scheduler.jobs and scheduler.outcome(spec.id) is None
    ]
    return facts


def rejoined_node(cluster: Cluster, devices: Sequence[LocalDevice], supplies: HostResources = UNKNOWN) -> RejoinedNode:
    """How the machine comes back into a cluster: with other devices than ever before it is another node."""
    banks = _banks(as_cluster(devices).nodes[0])
    for node in reversed(cluster.nodes):
        if _banks(node) == banks:
            return RejoinedNode(node.name, banks, _numbered(devices, node.devices.start), supplies)
    name = f"{NODE_NAME}-{len(cluster.nodes) + 1}"
    return RejoinedNode(name, banks, _numbered(devices, cluster.num_devices), supplies)


def _banks(node: Node) -> Banks:
    return tuple((str(bank.kind), len(bank.devices), bank.memory_bytes) for bank in node.banks)


def _numbered(devices: Sequence[LocalDevice], first: int) -> tuple[LocalDevice, ...]:
    return tuple(replace(device, id=first + place) for place, device in enumerate(devices))


StartLink = Callable[[Sequence[LocalDevice], Path], Awaitable[ExecutorPort]]


@dataclass(frozen=True, slots=True)
class RunRequest:
    """What a run is to do."""

    name: str  # of the job file
    jobs: tuple[ListedJob, ...]
    devices: tuple[LocalDevice, ...]
    policy: Policy
    policy_text: str  # as the user wrote it
    version: str
    supplies: HostResources = UNKNOWN  # of this machine


class LocalRun:
    """A run with everything that follows it: journal, metrics, ledger, and the job folders."""

    def __init__(
        self,
        asked: RunRequest,
        folder: RunFolder,
        *,
        resume: bool = False,
        copy: Path | None = None,
        observers: Sequence[Observer] = (),
        profiles: Mapping[JobId, ProfileRateModel] | None = None,
    ) -> None:
        self.asked = asked
        self.folder = folder
        self.devices = asked.devices
        self.names = {device.id: device.name for device in asked.devices}
        self._resume = resume and folder.journal.is_file()
        self.header, records = _history(asked, folder, resume=self._resume)
        self.ledger = JobAccounting()
        self.metrics = Metrics(self.header.cluster)
        self._profiles = dict(profiles or {})
        self.live = OnlineEstimator(self.header.cluster, initial_speeds(asked.devices))
        for spec, _ in asked.jobs:
            if spec.id in self._profiles:
                self.live.believe(spec, self._profiles[spec.id])
        self._scribe = JobFileWriter(folder)
        self._journal: JournalFile | None = None
        self._backend: LocalBackend | None = None
        self._starting: asyncio.Future[ExecutorPort] | None = None
        self.is_interrupted = False  # somebody has asked it to stop
        self._lessons = ProfileLearner(self.header.cluster, asked.version)
        self._followers: tuple[Observer, ...] = (self.metrics, self.ledger, self.live, self._lessons, *observers)
        self._copy = None if copy is None else JournalFile.create(copy, self.header)  # where the user wants one too
        if self._copy is not None:
            self._followers += (self._copy,)
        self.scheduler = Scheduler(
            self.header.cluster, asked.policy, estimator=self.live, observers=(self, *self._followers)
        )
        self.live.has_company = colocation_check(self.scheduler)
        self._first: list[Fact] = [JobSubmitted(spec) for spec, _ in asked.jobs]
        self._dropped: tuple[ListedJob, ...] = ()  # of the run that is resumed, no longer asked for
        if self._resume:
            self._return(records)

    @property
    def cluster(self) -> Cluster:
        """The devices there are, those of earlier sittings included."""
        return self.scheduler.cluster

    async def go(self, start_link: StartLink, clock: WaitableClock | None = None) -> RunEnd:
        """Run until all jobs are over, or until `interrupt`. Where nothing can be started, nothing is written."""
        link = await self._started(start_link)
        try:
            self._begin()
        except BaseException:
            if link is not None:
                await link.stop(checkpoint=False)
            raise
        try:
            if link is None:
                return RunEnd.INTERRUPTED
            for spec, program in (*self._dropped, *self.asked.jobs):
                if self.scheduler.outcome(spec.id) is None:
                    link.introduce(spec.id, program, resume=self._resume)
            self._backend = LocalBackend(self.scheduler, link, clock or WallClock(self.scheduler.at), self._take)
            return await self._backend.run(self._first)
        finally:
            for journal in filter(None, (self._journal, self._copy)):
                journal.close()
            self._keep_learned()

    def _begin(self) -> None:
        """Write down what was asked and what is believed, and open the journal."""
        asked, folder = self.asked, self.folder
        folder.begin(RunSettings(asked.name, asked.version, asked.policy_text, asked.devices, asked.jobs, self.names))
        for job, belief in self._profiles.items():
            self._keep_profile(job, belief.profile, BELIEVED)
        self._journal = (
            JournalFile.extend(folder.journal) if self._resume else JournalFile.create(folder.journal, self.header)
        )

    @property
    def has_begun(self) -> bool:
        """Whether its executor is there: before that nothing is lost by stopping."""
        return self._backend is not None

    def interrupt(self) -> None:
        """Stop with checkpoints; a second time, or before anything has begun, at once."""
        self.is_interrupted = True
        if self._backend is not None:
            self._backend.interrupt()
        elif self._starting is not None:
            self._starting.cancel()

    async def _started(self, start_link: StartLink) -> ExecutorPort | None:
        """The executor, which takes seconds to import torch; None when somebody interrupts meanwhile."""
        self._starting = asyncio.ensure_future(start_link(self.devices, self.folder.path))
        try:
            link = await self._starting
        except asyncio.CancelledError:
            if not self.is_interrupted:
                raise
            return None
        if self.is_interrupted:  # it was there already
            await link.stop(checkpoint=False)
            return None
        return link

    # ------------------------------------------------------------------------------------------------------ following
    def record(self, record: Record) -> None:
        """Keep a record durably before anybody acts on it, and the measurements in it with their jobs."""
        assert self._journal is not None
        self._journal.record(record)
        self._scribe.record(record)
        self._scribe.cut()()
        if any(isinstance(fact, NodeJoined) for fact in record.facts):
            self.live.cluster = self.scheduler.cluster

    def _take(self, at: float, report: Report) -> None:
        self.ledger.take(at, report)
        self.live.take(report)
        self._scribe.take(at, report)
        self._scribe.cut()()
        self._lessons.take(report)

    def _keep_learned(self) -> None:
        """Write down for later runs how fast the jobs were, alone and together, and what their moves cost."""
        for spec, program in self.asked.jobs:
            before = self._profiles.get(spec.id)
            profile = self._lessons.profile(spec.id, program, None if before is None else before.profile)
            if profile is not None:
                self._keep_profile(spec.id, profile, PROFILE)

    def _keep_profile(self, job: JobId, profile: Profile, name: str) -> None:
        with contextlib.suppress(InputError):  # a full disk takes nothing from the result
            write_profile(profile, self.folder.job(job) / name)

    # ------------------------------------------------------------------------------------------------------- resuming
    def _return(self, records: Sequence[Record]) -> None:
        """Fold what was recorded, then let the machine come back."""
        for record in records:
            for follower in self._followers:
                follower.record(record)
        self.scheduler.recover(records)
        over = frozenset(spec.id for spec, _ in self.asked.jobs if self.scheduler.outcome(spec.id) is not None)
        before = self.folder.settings()
        check_jobs_unchanged(before.jobs, self.asked.jobs, over)
        listed = {spec.id for spec, _ in self.asked.jobs}
        self._dropped = tuple(job for job in before.jobs if job.spec.id not in listed)
        for job in over:
            outcome = self.folder.outcome(job)
            if outcome is not None:
                self.ledger.close(outcome)
        self.live.cluster = self.scheduler.cluster
        back = rejoined_node(self.scheduler.cluster, self.asked.devices, self.asked.supplies)
        self.devices = back.devices
        self.names = {**before.names, **{device.id: device.name for device in back.devices}}
        self._first = facts_of_rejoin(self.scheduler, self.asked.jobs, back)


def _history(asked: RunRequest, folder: RunFolder, *, resume: bool) -> tuple[Header, list[Record]]:
    if resume and folder.journal.is_file():
        return read_journal_file(folder.journal)
    return Header(asked.version, asked.policy_text, as_cluster(asked.devices, asked.supplies)), []


def initial_speeds(devices: Sequence[LocalDevice]) -> dict[Kind, float]:
    """A first guess: a device of two cores is twice as fast as one of one; of GPUs nothing is guessed."""
    return {Kind(device.kind): float(len(device.cores) or 1) for device in devices}


def is_unfinished(folder: RunFolder) -> bool:
    """Whether a run was begun here that has jobs left to do."""
    if not folder.exists:
        return False
    if not folder.journal.is_file():
        return True
    _, records = read_journal_file(folder.journal)
    ledger = JobAccounting()
    for record in records:
        ledger.record(record)
    left: set[JobId] = {spec.id for spec, _ in folder.settings().jobs}
    return any(job not in ledger.accounts or not ledger.accounts[job].phase.is_over for job in left)
