"""Checkpoints are deleted of jobs that have been over for long enough, and of no others."""

import asyncio
import os
from pathlib import Path

import pytest

from carpool.backends.job_accounting import JobAccounting
from carpool.core.messages import Fact, JobCancelled, JobFinished, JobPaused, JobSubmitted
from carpool.core.model import JobId, JobSpec, Phase
from carpool.core.scheduler import Scheduler
from carpool.core.topology import Cluster
from carpool.policies.baselines.nonpreemptive import Fifo
from carpool.runtime.executor.job_folder import JobFolder
from carpool.service.daemon.retention import CheckpointRetention
from carpool.service.queries.present import TimeBase

DAY_S = 86400.0
OLD, NEEDED, RECENT, PAUSED, WAITING, WRITTEN = map(JobId, ("old", "needed", "recent", "paused", "waiting", "written"))


class Shop:
    """A scheduler with jobs of all kinds, at day 100; the folder of each was last written at day 0."""

    def __init__(self, state: Path, days: float, *, remembers: bool = True) -> None:
        self.state = state
        self.told: list[str] = []
        ledger = JobAccounting(Cluster.build([(1, 1, "cpu")]))
        observers = (ledger,) if remembers else ()
        scheduler = Scheduler(Cluster.build([(1, 9, "cpu")]), Fifo(), observers=observers)
        for name in (OLD, NEEDED, RECENT, PAUSED, WRITTEN):
            self.happen(scheduler, 0.0, JobSubmitted(JobSpec(name)))
        self.happen(scheduler, 0.0, JobSubmitted(JobSpec(WAITING, devices=10, after=(NEEDED,))))
        self.happen(scheduler, 1.0, JobPaused(PAUSED), JobFinished(NEEDED, 1))
        self.happen(scheduler, 1.0, JobCancelled(OLD), JobCancelled(WRITTEN))
        self.happen(scheduler, 80 * DAY_S, JobCancelled(RECENT))
        for name in scheduler.jobs.keys() | scheduler.ended.keys():
            self.write(name, 0.0)
        self.write(WRITTEN, 95 * DAY_S)
        tell = lambda job, words: self.told.append(f"{job}: {words}")  # noqa: E731
        self.scheduler = scheduler
        self.retention = CheckpointRetention(state, days, scheduler, ledger, TimeBase(0.0), tell, lambda: 100 * DAY_S)

    @staticmethod
    def happen(scheduler: Scheduler, at: float, *facts: Fact) -> None:
        scheduler.handle(at, list(facts))

    def write(self, name: JobId, at: float) -> None:
        folder = JobFolder(self.state, name)
        for checkpoints in (folder.checkpoints, folder.path / "checkpoints.1"):
            checkpoints.mkdir(parents=True, exist_ok=True)
            (checkpoints / "step-5.ckpt").write_bytes(b"weights")
            os.utime(checkpoints, (at, at))
        (folder.path / "log").write_text("said", encoding="utf-8")

    def left(self) -> set[str]:
        return {path.parent.parent.name for path in self.state.glob("jobs/*/checkpoints*/step-5.ckpt")}


@pytest.mark.parametrize(("days", "gone"), [(50.0, {OLD}), (10.0, {OLD, RECENT}), (1.0, {OLD, RECENT, WRITTEN})])
def test_only_what_has_been_over_for_long_is_deleted_and_only_checkpoints(
    tmp_path: Path, days: float, gone: set[JobId]
) -> None:
    shop = Shop(tmp_path, days)
    asyncio.run(shop.retention.check())
    assert shop.left() == {OLD, NEEDED, RECENT, PAUSED, WAITING, WRITTEN} - gone
    assert len(list(tmp_path.glob("jobs/*/log"))) == 6
    assert {words.partition(":")[0] for words in shop.told} == gone
    assert all(f"{days:g} days" in words for words in shop.told)
    asyncio.run(shop.retention.check())
    assert len(shop.told) == len(gone), "once"


def test_what_another_job_waits_for_stays_until_that_one_is_over(tmp_path: Path) -> None:
    shop = Shop(tmp_path, 1.0)
    assert shop.scheduler.outcome(NEEDED) is Phase.FINISHED
    asyncio.run(shop.retention.check())
    assert shop.left() == {NEEDED, PAUSED, WAITING}
    shop.happen(shop.scheduler, 80 * DAY_S, JobCancelled(WAITING))
    asyncio.run(shop.retention.check())
    assert shop.left() == {PAUSED}


def test_where_nobody_remembers_its_end_the_newest_checkpoint_tells(tmp_path: Path) -> None:
    shop = Shop(tmp_path, 10.0, remembers=False)
    asyncio.run(shop.retention.check())
    assert shop.left() == {NEEDED, PAUSED, WAITING, WRITTEN}


def test_with_no_days_nothing_is_ever_deleted(tmp_path: Path) -> None:
    shop = Shop(tmp_path, 0.0)
    asyncio.run(shop.retention.run())
    assert len(shop.left()) == 6
