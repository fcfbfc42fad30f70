"""Checkpoint retention: deletes checkpoints of ended jobs after a number of days."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from carpool.backends.job_accounting import JobAccounting
from carpool.core.model import JobId
from carpool.core.scheduler import Scheduler
from carpool.runtime.executor.job_folder import JobFolder
from carpool.service.queries.present import TimeBase

_DAY_S = 86400.0
_INTERVAL_S = 3600.0  # between checks


class _EndedJob(NamedTuple):
    job: JobId
    ended: float  # Unix time; 0 if the journal begins later


class CheckpointRetention:
    """Deletes checkpoints of jobs that ended `days` ago; 0: never. Logs, metrics and outcomes stay.

    Checkpoints of a job that another one waited for stay until that one is over too: it may start from them. If the
    journal does not contain a job's end, the time of its newest checkpoint counts.
    """

    def __init__(
        self, state: Path, days: float, scheduler: Scheduler, ledger: JobAccounting, calendar: TimeBase,
        tell: Callable[[JobId, str], None], now: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        self._state = state
        self._days = days
        self._scheduler = scheduler
        self._ledger = ledger
        self._calendar = calendar
        self._tell = tell
        self._now = now
        self._cleared: set[JobId] = set()  # jobs whose checkpoints are deleted

    async def run(self) -> None:
        while self._days:
            await self.check()
            await asyncio.sleep(_INTERVAL_S)

    async def check(self) -> None:
        """Delete old checkpoints in a thread, and record that in the jobs' histories."""
        over = list(self._over())
        for job in await asyncio.to_thread(self._clear, over):
            self._tell(job, f"checkpoints deleted {self._days:g} days after its end")

    def _over(self) -> Iterator[_EndedJob]:
        needed = {other for job in self._scheduler.jobs.values() for other in job.spec.after}
        for job in self._scheduler.ended:
            if job not in needed and job not in self._cleared:
                account = self._ledger.accounts.get(job)
                ended_at = None if account is None else account.ended_at
                yield _EndedJob(job, 0.0 if ended_at is None else self._calendar.unix(ended_at))

    def _clear(self, over: Sequence[_EndedJob]) -> list[JobId]:
        """Delete checkpoints that are too old. Returns the jobs that had any. A failed deletion is tried again."""
        cleared = []
        oldest = self._now() - self._days * _DAY_S
        for job, ended in over:
            try:
                folders = list(JobFolder(self._state, job).path.glob("checkpoints*"))  # with those of earlier attempts
                if max([ended, *(folder.stat().st_mtime for folder in folders)]) >= oldest:
                    continue
                for folder in folders:
                    shutil.rmtree(folder)
            except OSError:
                continue
            self._cleared.add(job)
            cleared += [job] if folders else []
        return cleared
