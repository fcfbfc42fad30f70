"""Runs jobs on this machine that are submitted one after another."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from carpool.backends.local import ExecutorPort
from carpool.backends.local_run import LocalRun, RunRequest
from carpool.backends.run_folder import RunFolder
from carpool.core.messages import JobFailed, JobFinished, JobSubmitted, Order
from carpool.core.model import JobId, JobSpec
from carpool.jobs.devices import LocalDevice
from carpool.jobs.program import Program
from carpool.predictors.profiles.rate_model import ProfileRateModel
from carpool.runtime.executor.client import ExecutorClient
from carpool.runtime.executor.reports import Facts, Report
from tests.support.shared_executor import SharedExecutor


class LateLink:
    """An executor's link through which more jobs are submitted as time goes by, or as soon as nothing else is left."""

    def __init__(self, link: ExecutorPort, late: Sequence[tuple[float, JobSpec]], num_open: int) -> None:
        self._link = link
        self._late = list(late)
        self._open = num_open  # jobs that are submitted and not over
        self._began = time.monotonic()
        self._hearing: asyncio.Task[Report] | None = None

    def introduce(self, job: JobId, program: Program, *, resume: bool = False) -> None:
        """As it is."""
        self._link.introduce(job, program, resume=resume)

    def carry(self, orders: Sequence[Order]) -> None:
        """As it is."""
        self._link.carry(orders)

    async def receive(self) -> Report:
        """What the executor says, or the next submission when its time has come."""
        if self._hearing is None:
            self._hearing = asyncio.create_task(self._link.receive())
        if self._late:
            left_s = max(0.0, self._late[0][0] - (time.monotonic() - self._began))
            heard, _ = await asyncio.wait({self._hearing}, timeout=left_s)
            if not heard:
                return Facts((self._next(),))
        report = await self._hearing
        self._hearing = None
        if isinstance(report, Facts):
            self._open -= sum(isinstance(fact, JobFinished | JobFailed) for fact in report.facts)
            if self._late and not self._open:  # else the run would end before its time has come
                return Facts((*report.facts, self._next()))
        return report

    async def stop(self, *, checkpoint: bool) -> None:
        """As it is."""
        await self._link.stop(checkpoint=checkpoint)

    def _next(self) -> JobSubmitted:
        self._open += 1
        return JobSubmitted(self._late.pop(0)[1])


class LateRun(LocalRun):
    """A run of jobs that are submitted at given seconds; of those without one at once."""

    def __init__(
        self,
        asked: RunRequest,
        folder: RunFolder,
        submit_s: Mapping[str, float],
        profiles: Mapping[JobId, ProfileRateModel] | None = None,
        lender: SharedExecutor | None = None,
    ) -> None:
        super().__init__(asked, folder, profiles=profiles)
        self._lender = lender
        specs = [spec for spec, _ in asked.jobs]
        late = [(submit_s[spec.id], spec) for spec in specs if submit_s.get(spec.id, 0.0) > 0.0]
        self._late = sorted(late, key=lambda pair: pair[0])
        waiting = {spec.id for _, spec in late}
        self._first = [JobSubmitted(spec) for spec in specs if spec.id not in waiting]

    async def start(self, devices: Sequence[LocalDevice], state: Path) -> ExecutorPort:
        """The executor of this machine, with the submissions to come."""
        start = ExecutorClient.start if self._lender is None else self._lender.lend
        link: ExecutorPort = await start(devices, state)
        return LateLink(link, self._late, len(self._first))
