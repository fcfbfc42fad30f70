"""A store says after a restart what it was told before, whatever of it a balance stands for by now."""

import asyncio
from contextlib import closing
from pathlib import Path

from carpool.backends.executor_group import ExecutorGroup
from carpool.backends.job_accounting import JobAccounting
from carpool.backends.online_estimator import OnlineEstimator
from carpool.backends.ports import LOCAL
from carpool.backends.profile_learner import ProfileLearner
from carpool.core.journal import Header
from carpool.core.model import JobId, JobSpec
from carpool.core.scheduler import Scheduler
from carpool.core.topology import Cluster
from carpool.jobs.job_file import ListedJob
from carpool.jobs.program import Program
from carpool.policies.baselines.nonpreemptive import Fifo
from carpool.service.daemon.loop import DaemonLoop, LoopHooks, LoopOptions, commit_inline
from carpool.service.daemon.recovery import StateObservers, recover_observers, recover_scheduler
from carpool.service.queries.allocation_history import AllocationHistory
from carpool.service.queries.event_log import EventFeed, EventLog
from carpool.service.store.store import Store
from tests.support.fake_executor import FakeExecutor

HEADER = Header("1", "fifo", Cluster.build([(1, 1, "cpu")]))
JOB = JobId("a")


def followers() -> StateObservers:
    cluster = HEADER.cluster
    return StateObservers(
        JobAccounting(cluster),
        OnlineEstimator(cluster),
        AllocationHistory(cluster),
        EventLog(EventFeed()),
        ProfileLearner(cluster, "1"),
    )


def test_what_a_training_said_of_itself_outlives_the_record_it_was_said_in(tmp_path: Path) -> None:
    async def play(store: Store) -> None:
        machine, learned = FakeExecutor({"a": 100}, batch=(8, 64)), followers()
        scheduler = Scheduler(HEADER.cluster, Fifo(), observers=(store, learned))
        host = LoopHooks(on_report=learned.take, sized=learned.learner.sized)
        daemon = DaemonLoop(
            scheduler, store, ExecutorGroup({LOCAL: machine}), machine, host, LoopOptions(commit=commit_inline)
        )
        machine.at(5.0, lambda: daemon.stop(leave_running=True))
        running = asyncio.create_task(daemon.run())
        await daemon.submit([ListedJob(JobSpec(JOB), Program(entry="digits.py:mlp"))])
        await running
        daemon.store_snapshot()

    with closing(Store.open(tmp_path, HEADER)) as store:
        asyncio.run(play(store))
        store.forget_before(1 << 30)
    with closing(Store.open(tmp_path, HEADER)) as store:
        assert not list(store.entries())
        scheduler, learned = Scheduler(HEADER.cluster, Fifo()), followers()
        recover_scheduler(store, scheduler)
        recover_observers(store, scheduler, learned)
        assert learned.estimator.total(JOB) == 100.0
        assert learned.estimator.own_batch(JobSpec(JOB)) == 8
        assert learned.learner.sized(JOB) is not None, "so that the next balance knows it too"
        [(_, account)] = learned.accounting.accounts.items()
        assert account.held == scheduler.jobs[JOB].desired
        assert [span.job for span in learned.allocations.between(0.0, 9.0)] == [JOB]
