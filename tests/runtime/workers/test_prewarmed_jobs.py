"""An executor with prewarmed processes: jobs start in them and learn the same."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from carpool.core.messages import Assign, JobFinished
from carpool.core.model import Allocation, JobId
from carpool.jobs.devices import LocalDevice
from carpool.jobs.program import Program
from carpool.runtime.executor.client_protocol import ExecutorOptions
from carpool.runtime.executor.executor import Executor
from carpool.runtime.executor.reports import Facts, Outcome, Report, Told
from carpool.runtime.process.warm_pool import WarmPool
from carpool.runtime.worker.entry_loader import load_training
from carpool.testing import plain_loop

HERE = Path(__file__).parent
MakeProgram = Callable[..., Program]
PREWARMED = "prewarmed process on cpu:0"


def test_jobs_start_in_prewarmed_processes(run: Any, program: MakeProgram, tmp_path: Path) -> None:
    reports: list[Report] = []
    devices = [LocalDevice(0, "cpu:0", "cpu1", (min(os.sched_getaffinity(0)),))]

    async def work() -> None:
        news = asyncio.Event()

        def report(each: Report) -> None:
            reports.append(each)
            news.set()

        async def until(found: Callable[[], bool]) -> None:
            while not found():
                executor.tick()
                news.clear()
                try:
                    await asyncio.wait_for(news.wait(), 0.1)
                except TimeoutError:
                    continue

        executor = Executor(devices, tmp_path, ExecutorOptions(hang_s=60.0), report)
        # Processes are prewarmed on GPUs only: here a CPU device stands in for one.
        launcher = executor.workers.launcher
        places = {device.id: device for device in devices}
        warm = launcher._warm = WarmPool(
            executor.workers.pool, places, 1, lambda device, lane: {}, launcher._may_prewarm, executor._clock
        )
        await executor.start()
        try:
            for number, job in enumerate(("a", "b")):
                processes = warm._gpus[0].processes
                await until(lambda processes=processes: any(process.is_warm for process in processes))  # type: ignore[misc]
                executor.add_job(JobId(job), program("mlp"), resume=False)
                executor.apply_orders([Assign(JobId(job), Allocation.of(0), number + 1)])
                await until(lambda job=job: job in outcomes())  # type: ignore[misc]
        finally:
            await executor.close()

    def outcomes() -> dict[str, str | None]:
        return {report.job: report.digest for report in reports if isinstance(report, Outcome)}

    run(work())
    plain = plain_loop(load_training("jobs.py:mlp", {}, seed=0, folder=HERE)).digest
    assert outcomes() == {"a": plain, "b": plain}
    notes = [report for report in reports if isinstance(report, Told) and PREWARMED in report.words]
    assert [report.job for report in notes] == ["a", "b"]
    facts = [fact for report in reports if isinstance(report, Facts) for fact in report.facts]
    assert [fact.job for fact in facts if isinstance(fact, JobFinished)] == ["a", "b"]
