"""Nobody is promised what the journal does not know, and a loop that comes back goes on where it was."""

import asyncio
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import pytest

from carpool.backends.executors import LOCAL, ExecutorGone, ExecutorGroup
from carpool.core.errors import InputError
from carpool.core.journal import Header
from carpool.core.messages import Assign, Fact, JobCancelled, JobFinished, JobPaused, JobResumed, NodeJoined, NodeLost
from carpool.core.model import JobId, JobSpec, NodeId, Phase
from carpool.core.scheduler import Scheduler
from carpool.core.topology import Cluster
from carpool.jobs.job_file import ListedJob
from carpool.jobs.program import Program
from carpool.policies.baselines.nonpreemptive import Fifo
from carpool.runtime.executor.reports import Facts, Outcome, Told
from carpool.service.daemon.group_commit import Commit, CommitFailed, commit_inline
from carpool.service.daemon.loop import DaemonLoop, LoopHooks, LoopOptions
from carpool.service.store.store import Store
from tests.support.fake_executor import FakeExecutor

HEADER = Header("1", "fifo", Cluster.build([(1, 1, "cpu")]))


def listed(name: str) -> ListedJob:
    return ListedJob(JobSpec(JobId(name)), Program(entry="digits.py:mlp", args={"name": name}))


def make_loop(scheduler: Scheduler, store: Store, machine: FakeExecutor, hooks: LoopHooks | None = None) -> DaemonLoop:
    """A loop that commits inline: virtual time does not wait for threads."""
    return DaemonLoop(
        scheduler, store, ExecutorGroup({LOCAL: machine}), machine, hooks, LoopOptions(commit=commit_inline)
    )


def commit_with(loop: DaemonLoop, commit: Commit) -> None:
    loop._commits.commit = commit


class Loops:
    """Opens loops on one folder; each `opened` is a start after a kill."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack

    def opened(self, machine: FakeExecutor) -> tuple[DaemonLoop, Store, Scheduler]:
        store = self._stack.enter_context(closing(Store.open(self._folder, HEADER)))
        scheduler = Scheduler(HEADER.cluster, Fifo(), observers=(store,))
        return make_loop(scheduler, store, machine), store, scheduler


@pytest.fixture
def loops(tmp_path: Path) -> Iterator[Loops]:
    with ExitStack() as stack:
        yield Loops(tmp_path, stack)


def when_idle(machine: FakeExecutor, loop: DaemonLoop, scheduler: Scheduler) -> None:
    """Stop the loop a while after all jobs are over."""

    def look() -> None:
        if scheduler.jobs:
            machine.at(machine.now() + 5.0, look)
        else:
            loop.stop()

    machine.at(machine.now() + 5.0, look)


def test_hooks_see_jobs_before_they_are_planned(tmp_path: Path) -> None:
    async def main() -> None:
        machine = FakeExecutor({"a": 3})
        with closing(Store.open(tmp_path, HEADER)) as store:
            scheduler = Scheduler(HEADER.cluster, Fifo(), observers=(store,))
            known: list[int] = []
            hooks = LoopHooks(
                before_submit=lambda jobs: known.append(len(scheduler.jobs)),
                on_submit=lambda jobs: known.append(len(scheduler.jobs)),
            )
            loop = make_loop(scheduler, store, machine, hooks)
            when_idle(machine, loop, scheduler)
            running = asyncio.create_task(loop.run())
            await loop.submit([listed("a")])
            assert known == [0, 1]
            await running

    asyncio.run(main())


def test_jobs_are_accepted_run_and_kept(loops: Loops) -> None:
    async def main() -> None:
        machine = FakeExecutor({"a": 3, "b": 4})
        loop, store, scheduler = loops.opened(machine)
        when_idle(machine, loop, scheduler)
        running = asyncio.create_task(loop.run())
        await loop.submit([listed("a"), listed("b")])
        assert [entry.details[JobId("a")]["program"]["entry"] for entry in store.entries() if entry.details] == [
            "digits.py:mlp"
        ]
        assert machine.introduced == {"a": False}, "b waits, and costs the executor nothing"
        await running
        assert (scheduler.outcome(JobId("a")), scheduler.outcome(JobId("b"))) == (Phase.FINISHED, Phase.FINISHED)
        assert machine.stopped == [False], "no job is left to checkpoint"
        assert len(list(store.entries())) > 4

    asyncio.run(main())


def test_orders_wait_for_the_disk(loops: Loops) -> None:
    async def main() -> None:
        machine = FakeExecutor({"a": 3})
        committed: list[int] = []

        async def watched(commit: Callable[[], None]) -> None:
            assert not machine.orders or committed, "an order was carried out before its record was durable"
            assert not machine.introduced or committed
            commit()
            committed.append(1)

        loop, _, scheduler = loops.opened(machine)
        commit_with(loop, watched)
        when_idle(machine, loop, scheduler)
        running = asyncio.create_task(loop.run())
        await loop.submit([listed("a")])
        assert committed
        await running
        assert isinstance(machine.orders[0], Assign)

    asyncio.run(main())


def test_a_caller_that_is_cancelled_does_not_affect_others(loops: Loops) -> None:
    async def main() -> None:
        machine = FakeExecutor({"a": 3, "b": 3})
        may_commit = asyncio.Event()

        async def slow(commit: Callable[[], None]) -> None:
            await may_commit.wait()
            commit()

        loop, _, scheduler = loops.opened(machine)
        commit_with(loop, slow)
        running = asyncio.create_task(loop.run())
        asked = [asyncio.create_task(loop.submit([listed(name)])) for name in "ab"]
        settling = asyncio.create_task(loop.flush())
        await asyncio.sleep(0)
        settling.cancel()
        asked[0].cancel()
        await asyncio.sleep(0)
        may_commit.set()
        await asked[1]
        when_idle(machine, loop, scheduler)
        await running
        assert {scheduler.outcome(JobId(name)) for name in "ab"} == {Phase.FINISHED}

    asyncio.run(main())


def test_a_taken_name_is_refused_and_stores_nothing(loops: Loops) -> None:
    async def main() -> None:
        machine = FakeExecutor({"a": 3, "b": 1})
        loop, store, scheduler = loops.opened(machine)
        when_idle(machine, loop, scheduler)
        running = asyncio.create_task(loop.run())
        await loop.submit([listed("a")])
        with pytest.raises(InputError, match="exists already"):
            await loop.submit([listed("b"), listed("a")])
        await loop.submit([listed("b")])
        await running
        submitted = [job for entry in store.entries() for job in entry.details]
        assert submitted == ["a", "b"]

    asyncio.run(main())


def test_user_commands_are_durable_when_they_return(loops: Loops) -> None:
    async def main() -> None:
        machine = FakeExecutor({"a": 100, "b": 2})
        loop, store, scheduler = loops.opened(machine)
        running = asyncio.create_task(loop.run())
        await loop.submit([listed("a"), listed("b")])
        for fact in (JobPaused(JobId("a")), JobResumed(JobId("a")), JobCancelled(JobId("a"))):
            await loop.apply(fact)
            assert fact in [stored for entry in store.entries() for stored in entry.record.facts]
        when_idle(machine, loop, scheduler)
        await running
        assert scheduler.outcome(JobId("a")) is Phase.CANCELLED
        assert scheduler.outcome(JobId("b")) is Phase.FINISHED

    asyncio.run(main())


def test_a_failed_commit_is_raised_and_ends_the_loop(loops: Loops) -> None:
    async def main() -> None:
        machine = FakeExecutor({"a": 3})
        loop, store, _ = loops.opened(machine)

        async def full(commit: Callable[[], None]) -> None:
            raise sqlite3.OperationalError("database or disk is full")

        commit_with(loop, full)
        running = asyncio.create_task(loop.run())
        with pytest.raises(CommitFailed, match="database or disk is full"):
            await loop.submit([listed("a")])
        with pytest.raises(CommitFailed):
            await running
        with pytest.raises(CommitFailed, match="disk is full"):
            await loop.submit([listed("b")])
        assert not machine.orders
        assert not list(store.entries())

    asyncio.run(main())


@pytest.mark.parametrize("with_snapshot", [False, True])
def test_a_killed_loop_continues_where_it_was(loops: Loops, with_snapshot: bool) -> None:
    async def first(kept: dict[JobId, float]) -> None:
        machine = FakeExecutor({"a": 10, "b": 10, "c": 10}, kept=kept)
        loop, _, _ = loops.opened(machine)
        machine.at(13.0, machine.report_progress)
        machine.at(14.0, machine.die)
        running = asyncio.create_task(loop.run())
        await loop.submit([listed("a"), listed("b"), listed("c")])
        if with_snapshot:
            loop.store_snapshot()
        with pytest.raises(ExecutorGone):
            await running

    async def second(kept: dict[JobId, float]) -> None:
        machine = FakeExecutor({"b": 10, "c": 10}, start=20.0, kept=kept)
        loop, store, scheduler = loops.opened(machine)
        after = 0
        programs: dict[str, Program] = {}
        if store.snapshot is not None:
            scheduler.restore(store.snapshot.state)
            after = store.snapshot.number
            programs = {job: Program(**detail["program"]) for job, detail in store.snapshot.details.items()}
        assert (after > 0) == with_snapshot
        entries = list(store.entries(after))
        scheduler.recover([entry.record for entry in entries])
        for entry in entries:
            programs |= {job: Program(**detail["program"]) for job, detail in entry.details.items()}
        assert set(programs) == {"a", "b", "c"}
        assert set(scheduler.jobs) == {"b", "c"}
        loop._programs |= {job: programs[job] for job in scheduler.jobs}
        when_idle(machine, loop, scheduler)
        await loop.run([NodeLost(NodeId(0)), NodeJoined("n0")])
        assert {scheduler.outcome(JobId(job)) for job in "abc"} == {Phase.FINISHED}
        assert machine.introduced == {"b": True, "c": True}
        assert machine.now() == 40.0, "the three steps that b had reported were not done again"

    kept: dict[JobId, float] = {}
    asyncio.run(first(kept))
    asyncio.run(second(kept))


def test_reports_are_acknowledged_when_stored_and_ended_jobs_are_forgotten(loops: Loops) -> None:
    async def main() -> None:
        machine = FakeExecutor({"a": 3, "b": 2})
        loop, store, scheduler = loops.opened(machine)
        kept: list[int] = []

        async def watched(commit: Callable[[], None]) -> None:
            assert machine.acknowledged <= (kept[-1] if kept else 0), "acknowledged before it was on the disk"
            commit()
            kept.append(max((entry.mark.of(LOCAL).heard for entry in store.entries()), default=0))

        commit_with(loop, watched)
        when_idle(machine, loop, scheduler)
        running = asyncio.create_task(loop.run())
        await loop.submit([listed("a"), listed("b")])
        await running
        assert machine.forgotten == ["a", "b"]
        assert machine.acknowledged == kept[-1] == machine.heard - 1, "all but the last word, that it is gone"
        noted = [note.report["report"] for entry in store.entries() for note in entry.reports]
        assert noted == ["Sized", "Outcome", "Sized", "Outcome"]

    asyncio.run(main())


def test_reports_without_a_following_record_are_stored(loops: Loops) -> None:
    async def main() -> None:
        machine = FakeExecutor({"a": 100})
        loop, store, _ = loops.opened(machine)
        running = asyncio.create_task(loop.run())
        await loop.submit([listed("a")])
        machine.at(1.0, lambda: machine.say(Told(JobId("a"), "something")))
        machine.at(2.0, loop.stop)
        await running
        loop.tell(JobId("a"), "and something else")
        await loop._commits.commit_once()
        told = [note.report.get("words") for entry in store.entries() for note in entry.reports]
        assert told == [None, "something", "and something else"]

    asyncio.run(main())


def test_an_outcome_is_stored_with_the_fact_of_the_end_or_not_at_all(loops: Loops) -> None:
    async def main() -> None:
        machine = FakeExecutor({"a": 100})
        loop, store, scheduler = loops.opened(machine)
        running = asyncio.create_task(loop.run())
        await loop.submit([listed("a")])
        job = JobId("a")

        def kinds() -> list[str]:
            return [note.report["report"] for entry in store.entries() for note in entry.reports]

        def look() -> None:
            before.extend(kinds())
            machine.say(Facts((JobFinished(job, scheduler.jobs[job].generation),)))

        before: list[str] = []
        machine.at(1.0, lambda: machine.say(Outcome(job, 3, 1, 0.5, {}, "digest", "reached its steps")))
        machine.at(1.0, lambda: machine.say(Told(job, "its story")))
        machine.at(2.0, look)  # much has been committed since
        machine.at(3.0, loop.stop)
        await running
        assert "Outcome" not in before
        assert kinds()[-2:] == ["Outcome", "Told"]

    asyncio.run(main())


def test_an_executor_that_dies_is_replaced_and_its_jobs_resume(loops: Loops) -> None:
    async def main() -> None:
        kept: dict[JobId, float] = {}
        machine = FakeExecutor({"a": 10}, kept=kept)
        second = FakeExecutor({"a": 10, "b": 5}, start=6.0, kept=kept)
        second.life = 2

        async def renew(name: str, reason: str) -> tuple[FakeExecutor, list[Fact]]:
            assert (name, reason) == (LOCAL, "killed by signal 9")
            machine.wait = second.wait  # type: ignore[method-assign]
            machine.now = second.now  # type: ignore[method-assign]
            return second, [NodeLost(NodeId(0)), NodeJoined("n0")]

        loop, store, scheduler = loops.opened(machine)
        loop._hooks = LoopHooks(renew=renew)
        machine.at(4.0, machine.report_progress)
        machine.at(5.0, machine.die)
        when_idle(second, loop, scheduler)
        running = asyncio.create_task(loop.run())
        await loop.submit([listed("a")])
        await running
        assert second.introduced == {"a": True}
        assert second.proceeds == 1
        assert scheduler.outcome(JobId("a")) is Phase.FINISHED
        assert second.now() == 16.0, "the four steps that were reported were not done again; then it idles"
        lives = [entry.mark.of(LOCAL).life for entry in store.entries()]
        assert lives == sorted(lives)
        assert set(lives) == {0, 1, 2}

    asyncio.run(main())


def test_an_aborted_loop_does_not_wait_for_an_executor_that_is_being_replaced(loops: Loops) -> None:
    async def main() -> None:
        machine, is_cancelled = FakeExecutor({"a": 10}), False

        async def renew(name: str, reason: str) -> tuple[FakeExecutor, list[Fact]]:
            nonlocal is_cancelled
            loop.stop()
            loop.abort()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                is_cancelled = True
                raise
            raise AssertionError

        loop, _, _ = loops.opened(machine)
        loop._hooks = LoopHooks(renew=renew)
        machine.at(5.0, machine.die)
        async with asyncio.timeout(30.0):
            await loop.run(jobs=[listed("a")])
        await asyncio.sleep(0)
        assert is_cancelled

    asyncio.run(main())


def test_left_running_the_executor_is_not_stopped(loops: Loops) -> None:
    async def main() -> None:
        machine = FakeExecutor({"a": 100})
        loop, store, _ = loops.opened(machine)
        machine.at(3.0, lambda: loop.stop(leave_running=True))
        running = asyncio.create_task(loop.run())
        await loop.submit([listed("a")])
        await running
        assert (machine.stopped, machine.is_left) == ([], True)
        assert store.mark.of(LOCAL).heard == machine.heard

    asyncio.run(main())


def test_records_behind_a_snapshot_are_dropped(loops: Loops) -> None:
    async def main() -> None:
        machine = FakeExecutor({f"j{number}": 1 for number in range(12)})
        loop, store, scheduler = loops.opened(machine)
        loop._options = replace(loop._options, retain=8)
        when_idle(machine, loop, scheduler)
        running = asyncio.create_task(loop.run())
        await loop.submit([listed(f"j{number}") for number in range(12)])
        await running
        before = [entry.number for entry in store.entries()]
        assert len(before) > 10
        loop.store_snapshot()
        assert [entry.number for entry in store.entries()] == before[-8:]
        _, again, recovered = loops.opened(machine)
        assert again.snapshot is not None
        recovered.restore(again.snapshot.state)
        assert recovered.outcome(JobId("j0")) is Phase.FINISHED, "how jobs ended is in the snapshot"

    asyncio.run(main())
