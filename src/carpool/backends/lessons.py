"""What is learned of jobs while they run, job by job, as profiles for those that come later."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from carpool.backends.stopwatch import Stopwatch
from carpool.backends.writeback import learned
from carpool.core.messages import Record
from carpool.core.model import Job, JobId
from carpool.core.topology import Cluster
from carpool.predictors.profile import Profile
from carpool.runtime.program import Program
from carpool.runtime.reports import Outcome, Report, Sized


class Lessons:
    """Follows records and reports; what they teach of a job is its profile."""

    def __init__(self, cluster: Cluster, version: str) -> None:
        self._version = version
        self._stopwatch = Stopwatch(cluster)
        self._sized: dict[JobId, Sized] = {}

    def go_on_with(self, jobs: Mapping[JobId, Job]) -> None:
        """Follow these jobs from here on, which were submitted before anybody looked, and no others."""
        self._sized = {job: sized for job, sized in self._sized.items() if job in jobs}
        for job in jobs.values():
            self._stopwatch.adopt(job)

    def record(self, record: Record) -> None:
        """Take in one record."""
        self._stopwatch.record(record)

    def take(self, report: Report) -> None:
        """Take in what an executor says."""
        match report:
            case Sized(job=job):
                self._sized[job] = report
            case Outcome(job=job, steps=steps):
                self._stopwatch.ended(job, steps)

    def sized(self, job: JobId) -> Sized | None:
        """What a training said of itself when it was loaded; None: nothing yet."""
        return self._sized.get(job)

    def profile(self, job: JobId, program: Program, before: Profile | None) -> Profile | None:
        """What was known before with what was learned now; None where that is nothing."""
        timed, sized = self._stopwatch.timed(job), self._sized.get(job)
        if not timed or sized is None or not sized.batch_size or not program.entry:
            return None
        profile = learned(before, program, sized, timed, self._stopwatch.costs(job))
        return replace(profile, version=self._version)

    def forget(self, job: JobId) -> None:
        """A job that is over needs no place any more."""
        self._sized.pop(job, None)
        self._stopwatch.forget(job)
