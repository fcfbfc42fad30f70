"""Recovery: an executor gets what it missed, and observers what the store or its snapshot holds."""

import asyncio
from contextlib import closing
from pathlib import Path

from carpool.backends.executors import LOCAL, ExecutorGroup
from carpool.backends.job_accounting import JobAccounting
from carpool.backends.online_estimator import OnlineEstimator
from carpool.backends.profile_learner import ProfileLearner
from carpool.core.journal import Header
from carpool.core.messages import Assign, Probe, Release
from carpool.core.model import Allocation, Job, JobId, JobSpec, Phase
from carpool.core.scheduler import Scheduler
from carpool.core.topology import Cluster
from carpool.jobs.job_file import ListedJob
from carpool.jobs.program import Program
from carpool.policies.baselines.nonpreemptive import Fifo
from carpool.runtime.executor.client_protocol import HeldJobStatus
from carpool.service.daemon.group_commit import commit_inline
from carpool.service.daemon.halving_control import HalvingControl
from carpool.service.daemon.loop import DaemonLoop, LoopHooks, LoopOptions
from carpool.service.daemon.recovery import (
    ResyncActions,
    StateObservers,
    is_ahead,
    reconcile,
    recover_observers,
    recover_scheduler,
)
from carpool.service.queries.allocation_history import AllocationHistory
from carpool.service.queries.event_log import EventFeed, EventLog
from carpool.service.store.store import Store
from tests.support.fake_executor import FakeExecutor

HEADER = Header("1", "fifo", Cluster.build([(1, 1, "cpu")]))
JOB = JobId("a")
A, B, C, D = map(JobId, "abcd")


def job(name: JobId, seq: int, generation: int, held: Allocation | None = None, applied: int = 0) -> Job:
    phase = Phase.WAITING if held is None else Phase.RUNNING
    return Job(JobSpec(name), seq, 0.0, phase, held, generation, applied=applied)


def held_status(generation: int, *, is_over: bool = False) -> HeldJobStatus:
    return HeldJobStatus(generation, 7, True, is_over)


def test_missed_orders_are_repeated_and_ended_jobs_forgotten() -> None:
    held = Allocation.of(0)
    jobs = {A: job(A, 0, 2, held), B: job(B, 1, 3), C: job(C, 2, 0), D: job(D, 3, 4, held, applied=4)}
    held_jobs = {
        A: held_status(1),
        B: held_status(3),
        JobId("gone"): held_status(5),
        JobId("done"): held_status(1, is_over=True),
    }
    assert reconcile(jobs, {LOCAL: held_jobs}) == ResyncActions(
        holders={A: LOCAL, B: LOCAL},
        orders=(Assign(A, held, 2), Assign(D, held, 4)),
        forget=((LOCAL, JobId("done")), (LOCAL, JobId("gone"))),
    )


def test_of_two_executors_the_one_with_the_newest_order_holds_a_job() -> None:
    jobs = {A: job(A, 0, 3, Allocation.of(0)), B: job(B, 1, 2, Allocation.of(1))}
    held = {"x": {A: held_status(2), B: held_status(2)}, "y": {A: held_status(3), B: held_status(1)}}
    assert reconcile(jobs, held) == ResyncActions(holders={A: "y", B: "x"}, orders=(), forget=(("x", A), ("y", B)))


def test_a_missed_probe_is_repeated_as_a_probe() -> None:
    probed = job(A, 0, 2, Allocation.of(0))._replace(probe_steps=5)
    assert reconcile({A: probed}, {LOCAL: {A: held_status(1)}}).orders == (Assign(A, Allocation.of(0), 2, Probe(5)),)


def test_a_missed_release_is_repeated() -> None:
    assert reconcile({A: job(A, 0, 2)}, {LOCAL: {A: held_status(1)}}).orders == (Release(A, 2),)


def test_an_executor_with_newer_orders_than_the_journal_is_ahead() -> None:
    assert not is_ahead({A: job(A, 0, 2)}, {A: held_status(2), B: held_status(9)})
    assert is_ahead({A: job(A, 0, 2)}, {A: held_status(3)})


def observers() -> StateObservers:
    cluster = HEADER.cluster
    return StateObservers(
        JobAccounting(cluster),
        OnlineEstimator(cluster),
        AllocationHistory(cluster),
        EventLog(EventFeed()),
        ProfileLearner(cluster, "1"),
        HalvingControl(),
    )


def test_a_trainings_size_outlives_the_record_it_was_reported_in(tmp_path: Path) -> None:
    async def play(store: Store) -> None:
        machine, seen = FakeExecutor({"a": 100}, batch=(8, 64)), observers()
        scheduler = Scheduler(HEADER.cluster, Fifo(), observers=(store, seen))
        hooks = LoopHooks(on_report=seen.take, sized=seen.learner.sized)
        loop = DaemonLoop(
            scheduler, store, ExecutorGroup({LOCAL: machine}), machine, hooks, LoopOptions(commit=commit_inline)
        )
        machine.at(5.0, lambda: loop.stop(leave_running=True))
        running = asyncio.create_task(loop.run())
        await loop.submit([ListedJob(JobSpec(A), Program(entry="digits.py:mlp"))])
        await running
        loop.store_snapshot()

    with closing(Store.open(tmp_path, HEADER)) as store:
        asyncio.run(play(store))
        store.forget_before(1 << 30)
    with closing(Store.open(tmp_path, HEADER)) as store:
        assert not list(store.entries())
        scheduler, seen = Scheduler(HEADER.cluster, Fifo()), observers()
        recover_scheduler(store, scheduler)
        recover_observers(store, scheduler, seen)
        assert seen.estimator.total(A) == 100.0
        assert seen.estimator.own_batch(JobSpec(A)) == 8
        assert seen.learner.sized(A) is not None, "so that the next snapshot has it too"
        [(_, account)] = seen.accounting.accounts.items()
        assert account.held == scheduler.jobs[A].desired
        assert [span.job for span in seen.allocations.between(0.0, 9.0)] == [A]
