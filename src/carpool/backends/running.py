"""One run on this machine from its parts: jobs, devices, policy, folder; begun anew or resumed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from carpool.backends.journal_file import JournalFile, read_whole
from carpool.backends.ledger import Ledger
from carpool.backends.lessons import Lessons
from carpool.backends.live import Live, in_company
from carpool.backends.local import ExecutorPort, LocalBackend, RunEnd, WaitableClock, WallClock
from carpool.backends.resuming import check_unchanged, facts_of_return, returned
from carpool.backends.runfolder import BELIEVED, PROFILE, RunFolder, RunSettings
from carpool.backends.scribe import Scribe
from carpool.core.errors import InputError
from carpool.core.journal import Header
from carpool.core.messages import Fact, JobSubmitted, NodeJoined, Record
from carpool.core.metrics import Metrics
from carpool.core.model import JobId, Kind
from carpool.core.policy import Policy
from carpool.core.ports import Observer
from carpool.core.scheduler import Scheduler
from carpool.core.supplies import UNKNOWN, Supplies
from carpool.core.topology import Cluster
from carpool.predictors.belief import ProfileBelief
from carpool.predictors.profile import Profile
from carpool.predictors.profile_file import write_profile
from carpool.runtime.devices import LocalDevice, as_cluster
from carpool.runtime.jobfile import Listed
from carpool.runtime.reports import Report

StartLink = Callable[[Sequence[LocalDevice], Path], Awaitable[ExecutorPort]]


@dataclass(frozen=True, slots=True)
class RunRequest:
    """What a run is to do."""

    name: str  # of the job file
    jobs: tuple[Listed, ...]
    devices: tuple[LocalDevice, ...]
    policy: Policy
    policy_text: str  # as the user wrote it
    version: str
    supplies: Supplies = UNKNOWN  # of this machine


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
        profiles: Mapping[JobId, ProfileBelief] | None = None,
    ) -> None:
        self.asked = asked
        self.folder = folder
        self.devices = asked.devices
        self.names = {device.id: device.name for device in asked.devices}
        self._resume = resume and folder.journal.is_file()
        self.header, records = _history(asked, folder, resume=self._resume)
        self.ledger = Ledger()
        self.metrics = Metrics(self.header.cluster)
        self._profiles = dict(profiles or {})
        self.live = Live(self.header.cluster, speeds_of(asked.devices))
        for spec, _ in asked.jobs:
            if spec.id in self._profiles:
                self.live.believe(spec, self._profiles[spec.id])
        self._scribe = Scribe(folder)
        self._journal: JournalFile | None = None
        self._backend: LocalBackend | None = None
        self._starting: asyncio.Future[ExecutorPort] | None = None
        self.is_interrupted = False  # somebody has asked it to stop
        self._lessons = Lessons(self.header.cluster, asked.version)
        self._followers: tuple[Observer, ...] = (self.metrics, self.ledger, self.live, self._lessons, *observers)
        self._copy = None if copy is None else JournalFile.create(copy, self.header)  # where the user wants one too
        if self._copy is not None:
            self._followers += (self._copy,)
        self.scheduler = Scheduler(
            self.header.cluster, asked.policy, estimator=self.live, observers=(self, *self._followers)
        )
        self.live.has_company = in_company(self.scheduler)
        self._first: list[Fact] = [JobSubmitted(spec) for spec, _ in asked.jobs]
        self._dropped: tuple[Listed, ...] = ()  # of the run that is resumed, no longer asked for
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
        check_unchanged(before.jobs, self.asked.jobs, over)
        listed = {spec.id for spec, _ in self.asked.jobs}
        self._dropped = tuple(job for job in before.jobs if job.spec.id not in listed)
        for job in over:
            outcome = self.folder.outcome(job)
            if outcome is not None:
                self.ledger.close(outcome)
        self.live.cluster = self.scheduler.cluster
        back = returned(self.scheduler.cluster, self.asked.devices, self.asked.supplies)
        self.devices = back.devices
        self.names = {**before.names, **{device.id: device.name for device in back.devices}}
        self._first = facts_of_return(self.scheduler, self.asked.jobs, back)


def _history(asked: RunRequest, folder: RunFolder, *, resume: bool) -> tuple[Header, list[Record]]:
    if resume and folder.journal.is_file():
        return read_whole(folder.journal)
    return Header(asked.version, asked.policy_text, as_cluster(asked.devices, asked.supplies)), []


def speeds_of(devices: Sequence[LocalDevice]) -> dict[Kind, float]:
    """A first guess: a device of two cores is twice as fast as one of one; of GPUs nothing is guessed."""
    return {Kind(device.kind): float(len(device.cores) or 1) for device in devices}


def is_unfinished(folder: RunFolder) -> bool:
    """Whether a run was begun here that has jobs left to do."""
    if not folder.exists:
        return False
    if not folder.journal.is_file():
        return True
    _, records = read_whole(folder.journal)
    ledger = Ledger()
    for record in records:
        ledger.record(record)
    left: set[JobId] = {spec.id for spec, _ in folder.settings().jobs}
    return any(job not in ledger.accounts or not ledger.accounts[job].phase.is_over for job in left)
