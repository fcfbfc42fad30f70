"""Batch statistics of running jobs: gradient noise scale, effective progress and memory per batch size."""

from __future__ import annotations

from dataclasses import dataclass

from carpool.core.messages import ProgressReported
from carpool.core.model import Job, JobId, JobSpec


@dataclass(slots=True)
class JobBatchStats:
    """One job."""

    own: int = 0  # its own batch size, where its spec does not say
    noise: float | None = None  # gradient noise scale φ in samples, as last reported
    done: float = 0.0  # steps, as last reported
    ahead: float = 0.0  # samples beyond those that as many steps with the own batch would have taken, in such steps
    most: int = 0  # the largest batch so far
    memory_bytes: int = 0  # and what was held at most until then


class BatchStats:
    """Follows reports of jobs whatever their batch sizes are, in steps with their own."""

    def __init__(self) -> None:
        self._seen: dict[JobId, JobBatchStats] = {}

    def own(self, spec: JobSpec) -> int:
        """The batch size of the job file, else that of the training once it is loaded; 0: unknown."""
        return spec.batch_size or self._of(spec.id).own

    def loaded(self, job: JobId, batch_size: int) -> None:
        """A training has said what its own batch is."""
        self._of(job).own = batch_size

    def noise(self, job: JobId) -> float | None:
        """As last reported; None: never."""
        return self._of(job).noise

    def ahead(self, job: JobId) -> float:
        """How many steps with its own batch a job is beyond what its steps count."""
        return self._of(job).ahead

    def learn(self, job: Job, report: ProgressReported) -> None:
        """Take one report in."""
        seen, own = self._of(job.id), self.own(job.spec)
        batch = own if job.observed is None else job.observed.batch_size or own
        if report.noise is not None:
            seen.noise = report.noise
        if own:
            seen.ahead += (report.done - seen.done) * (batch / own - 1.0)
        seen.done = report.done
        seen.most, seen.memory_bytes = max(seen.most, batch), max(seen.memory_bytes, report.memory_bytes)

    def memory(self, job: JobId, batch_size: int) -> int:
        """At most what was held, in proportion where a batch is larger than any so far: states do not grow with it."""
        seen = self._of(job)
        return int(seen.memory_bytes * max(1.0, batch_size / seen.most)) if seen.most else 0

    def forget(self, job: JobId) -> None:
        """A job is over."""
        self._seen.pop(job, None)

    def _of(self, job: JobId) -> JobBatchStats:
        seen = self._seen.get(job)
        if seen is None:
            seen = self._seen[job] = JobBatchStats()
        return seen
