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
_EVERY_S = 3600.0  # between looks for checkpoints that have become too old


class _EndedJob(NamedTuple):
    job: JobId
    ended: float  # Unix time; 0 where the journal does not go back so far


class CheckpointRetention:
    """Deletes checkpoints of jobs that have been over for `days`; 0: never. Logs, figures and outcomes stay.

    A job is over when the scheduler's books say so, not when a folder looks like it. Checkpoints of one that another
    job waited for stay until that one is over too: it may begin from them. Where nobody remembers when a job ended, its
    newest checkpoint tells.
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
        self._cleared: set[JobId] = set()  # jobs that have none any more

    async def run(self) -> None:
        """Look now and every hour."""
        while self._days:
            await self.check()
            await asyncio.sleep(_EVERY_S)

    async def check(self) -> None:
        """Delete what has become too old, aside, and say so in the stories of the jobs."""
        over = list(self._over())
        for job in await asyncio.to_thread(self._clear, over):
            self._tell(job, f"its checkpoints were deleted, {self._days:g} days after its end")

    def _over(self) -> Iterator[_EndedJob]:
        needed = {other for job in self._scheduler.jobs.values() for other in job.spec.after}
        for job in self._scheduler.ended:
            if job not in needed and job not in self._cleared:
                account = self._ledger.accounts.get(job)
                ended_at = None if account is None else account.ended_at
                yield _EndedJob(job, 0.0 if ended_at is None else self._calendar.unix(ended_at))

    def _clear(self, over: Sequence[_EndedJob]) -> list[JobId]:
        """Delete what is too old; of which jobs there was something. What cannot be deleted now is tried again."""
        found = []
        oldest = self._now() - self._days * _DAY_S
        for job, ended in over:
            try:
                folders = list(JobFolder(self._state, job).path.glob("checkpoints*"))  # those put aside too
                if max([ended, *(folder.stat().st_mtime for folder in folders)]) >= oldest:
                    continue
                for folder in folders:
                    shutil.rmtree(folder)
            except OSError:
                continue
            self._cleared.add(job)
            found += [job] if folders else []
        return found
