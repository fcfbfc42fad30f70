"""A service over a daemon with a fake executor; time passes only when a test advances it."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from carpool.backends.executors import LOCAL, ExecutorGroup
from carpool.backends.job_accounting import JobAccounting
from carpool.core.estimates import DeclaredEstimator
from carpool.core.journal import Header
from carpool.core.model import JobId, JobSpec
from carpool.core.policy import Policy
from carpool.core.scheduler import Scheduler
from carpool.core.topology import Cluster
from carpool.jobs.job_file import ListedJob
from carpool.jobs.program import Program
from carpool.policies.baselines.nonpreemptive import Fifo
from carpool.policies.registry import parse_policy
from carpool.runtime.executor.reports import Outcome, Report, Told
from carpool.service.admission import Quotas
from carpool.service.daemon.group_commit import Commit, commit_inline
from carpool.service.daemon.loop import DaemonLoop, LoopHooks, LoopOptions
from carpool.service.daemon.read_model import ReadModel
from carpool.service.queries.allocation_history import AllocationHistory
from carpool.service.queries.event_log import EventFeed, EventLog
from carpool.service.queries.present import TimeBase
from carpool.service.service import SchedulerService
from carpool.service.store.store import Store
from tests.support.daemon_task import at_work
from tests.support.fake_executor import FakeExecutor

CALENDAR = TimeBase(1_000_000.0)
TWO_CORES = Cluster.build([(1, 2, "cpu")])
_STEPS = 1000  # of a job without a given length


class ManualExecutor(FakeExecutor):
    """A fake executor whose clock stands still until `advance`."""

    def __init__(self, steps: Mapping[str, int] | None = None, **options: Any) -> None:
        super().__init__(defaultdict(lambda: _STEPS, steps or {}), **options)
        self._moved = asyncio.Event()

    def advance(self, seconds: float) -> None:
        """Advance the clock; jobs that reach their end report it."""
        self._at += seconds
        for job in [job for job in self._running if self._end_of(job) <= self._at]:
            self._finish(job)
        self._moved.set()

    async def wait(self, tasks: set[asyncio.Task[Any]], until: float | None) -> None:
        """Wait for a task, or for the clock to advance."""
        moved = asyncio.ensure_future(self._moved.wait())
        try:
            await asyncio.wait({*tasks, moved}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            moved.cancel()
        self._moved.clear()


@dataclass(frozen=True, slots=True)
class ServiceRig:
    """A service and the parts behind it."""

    service: SchedulerService
    executor: ManualExecutor
    loop: DaemonLoop
    read_model: ReadModel

    async def settle(self, seconds: float = 0.0) -> None:
        """Process all pending events, advance the clock, and process what follows."""
        for passing in (0.0, seconds):
            self.executor.advance(passing)
            for _ in range(20):
                await asyncio.sleep(0)
            await self.loop.flush()


def listed(name: str, **fields: Any) -> ListedJob:
    """A job of an entry file that is never read."""
    return ListedJob(JobSpec(JobId(name), **fields), Program(entry=f"{name}.py:main"))


@asynccontextmanager
async def open_service(
    folder: Path,
    *,
    cluster: Cluster = TWO_CORES,
    policy: Policy | None = None,
    commit: Commit = commit_inline,
    quotas: Quotas | None = None,
    notes: Mapping[JobId, Mapping[str, Any]] | None = None,
    **steps: int,
) -> AsyncIterator[ServiceRig]:
    """Run a daemon whose jobs need the given numbers of steps, at time 0."""
    executor = ManualExecutor(steps)
    store = Store.open(folder / "store", Header("1", "fifo", cluster))
    accounting, allocations = JobAccounting(cluster), AllocationHistory(cluster)
    programs: dict[JobId, Program] = {}
    events = EventLog(EventFeed(), CALENDAR.unix)
    observers = (store, accounting, allocations, events)
    scheduler = Scheduler(
        cluster, policy or Fifo(), observers=observers, find_policy=parse_policy, fallback="fifo:bypass=true"
    )

    def accept(jobs: Sequence[ListedJob]) -> None:
        programs.update({spec.id: program for spec, program in jobs})

    def take(at: float, report: Report) -> None:
        match report:
            case Told(job=job, words=words):
                accounting.tell(at, job, words)
            case Outcome():
                accounting.close(report)
        events.on_report(at, report)

    hooks = LoopHooks(on_submit=accept, on_report=take)
    executors = ExecutorGroup({LOCAL: executor})
    loop = DaemonLoop(scheduler, store, executors, executor, hooks, LoopOptions(commit=commit))
    names = {device: f"cpu:{device}" for device in range(cluster.num_devices)}
    model = ReadModel(
        loop=loop,
        scheduler=scheduler,
        accounting=accounting,
        estimates=DeclaredEstimator(),
        allocations=allocations,
        events=events,
        programs=programs,
        total_steps=lambda job: None,
        state=folder,
        names=names,
        calendar=CALENDAR,
        now=executor.now,
        version="1",
        policy=lambda: scheduler.policy_text or "fifo",
    )
    async with at_work(model, store):
        yield ServiceRig(SchedulerService(model, notes, quotas), executor, loop, model)
