"""Batch statistics of running jobs: gradient noise scale, effective progress and memory per batch size."""

from __future__ import annotations

from dataclasses import dataclass

from carpool.core.messages import ProgressReported
from carpool.core.model import Job, JobId, JobSpec


@dataclass(slots=True)
class JobBatchStats:
    """Statistics of one job."""

    own: int = 0  # the training's batch size, where the spec has none
    noise: float | None = None  # gradient noise scale φ in samples, as last reported
    done: float = 0.0  # steps, as last reported
    ahead: float = 0.0  # progress beyond the step count thanks to larger batches, in steps of the own batch size
    largest: int = 0  # batch size so far
    memory_bytes: int = 0  # peak until then


class BatchStats:
    """Follows progress reports at any batch size, in steps of the job's own batch size."""

    def __init__(self) -> None:
        self._jobs: dict[JobId, JobBatchStats] = {}

    def own(self, spec: JobSpec) -> int:
        """The batch size of the job file, else of the training once it is loaded; 0: unknown."""
        return spec.batch_size or self._of(spec.id).own

    def loaded(self, job: JobId, batch_size: int) -> None:
        self._of(job).own = batch_size

    def noise(self, job: JobId) -> float | None:
        """The gradient noise scale as last reported; None: never."""
        return self._of(job).noise

    def ahead(self, job: JobId) -> float:
        return self._of(job).ahead

    def learn(self, job: Job, report: ProgressReported) -> None:
        stats, own = self._of(job.id), self.own(job.spec)
        batch = own if job.observed is None else job.observed.batch_size or own
        if report.noise is not None:
            stats.noise = report.noise
        if own:
            stats.ahead += (report.done - stats.done) * (batch / own - 1.0)
        stats.done = report.done
        stats.largest, stats.memory_bytes = max(stats.largest, batch), max(stats.memory_bytes, report.memory_bytes)

    def memory(self, job: JobId, batch_size: int) -> int:
        """An upper bound of the memory with a batch size: the peak so far, scaled up for larger batches."""
        stats = self._of(job)
        return int(stats.memory_bytes * max(1.0, batch_size / stats.largest)) if stats.largest else 0

    def forget(self, job: JobId) -> None:
        self._jobs.pop(job, None)

    def _of(self, job: JobId) -> JobBatchStats:
        stats = self._jobs.get(job)
        if stats is None:
            stats = self._jobs[job] = JobBatchStats()
        return stats
