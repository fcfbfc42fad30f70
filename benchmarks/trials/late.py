"""Runs jobs on this machine that are submitted one after another."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence

from carpool.backends.run_folder import RunFolder
from carpool.core.messages import Fact
from carpool.core.model import JobId
from carpool.core.scheduler import Scheduler
from carpool.jobs.job_file import ListedJob
from carpool.runtime.executor.client import ExecutorClient
from carpool.service.daemon.batch_run import BatchRun, RunEnd, RunRequest
from carpool.service.daemon.loop import EndWhenDone
from carpool.service.fleet.executor_access import StartExecutor


class EndWhenAllSubmitted(EndWhenDone):
    """Ends when every job is over, those to come included."""

    def __init__(self, waiting: set[JobId]) -> None:
        super().__init__()
        self._waiting = waiting

    def is_over(self, scheduler: Scheduler) -> bool:
        """Whether every job was submitted and is over."""
        return not self._waiting and super().is_over(scheduler)

    def starved(self, scheduler: Scheduler) -> Sequence[Fact]:
        """None while submissions may change what is planned."""
        return () if self._waiting else super().starved(scheduler)


class LateRun(BatchRun):
    """A run of jobs that are submitted at given seconds, and of those without one at once."""

    submit_s: Mapping[str, float]
    waiting: set[JobId]
    begun: asyncio.Event

    @classmethod
    def prepare(
        cls,
        request: RunRequest,
        folder: RunFolder,
        submit_s: Mapping[str, float],
        start: StartExecutor = ExecutorClient.start,
    ) -> LateRun:
        """Open the run; jobs are submitted in it at these seconds."""
        waiting = {spec.id for spec, _ in request.jobs if submit_s.get(spec.id, 0.0) > 0.0}
        run = cls.open(request, folder, start, end=EndWhenAllSubmitted(waiting))
        run.submit_s, run.waiting, run.begun = submit_s, waiting, asyncio.Event()
        return run

    async def run(self) -> RunEnd:
        """Run all jobs to their end."""
        submitting = asyncio.create_task(self._submit_late())
        try:
            return await super().run()
        finally:
            submitting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await submitting
            self.close()

    def _fresh(self) -> list[ListedJob]:
        self.begun.set()
        return [job for job in super()._fresh() if job.spec.id not in self.waiting]

    async def _submit_late(self) -> None:
        await self.begun.wait()
        began = time.monotonic()
        late = [job for job in self.request.jobs if job.spec.id in self.waiting]
        for job in sorted(late, key=lambda each: self.submit_s[each.spec.id]):
            await asyncio.sleep(max(0.0, self.submit_s[job.spec.id] - (time.monotonic() - began)))
            await self._daemon.loop.submit([job])
            self.waiting.discard(job.spec.id)
