"""Daemons that are killed, restarted and replaced: every job ends once, with the weights of an undisturbed run."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path

import pytest

from carpool.backends.executors import LOCAL, ExecutorPort
from carpool.core.errors import InputError
from carpool.core.messages import Fact, JobResumed, NodeLost, PolicyChanged, WeightChanged
from carpool.core.model import JobId, Kind, Phase
from carpool.core.topology import Placement
from carpool.jobs.devices import parse_devices
from carpool.jobs.job_file import ListedJob, read_jobs
from carpool.runtime.executor.client import ExecutorOptions, ExecutorSocket
from carpool.runtime.executor.job_folder import JobFolder
from carpool.runtime.executor.job_guard import JobMarker
from carpool.runtime.worker.entry_loader import load_training
from carpool.service.auth import Principal, Role
from carpool.service.daemon.bootstrap import DaemonInstance, DaemonOptions
from carpool.service.service import SchedulerService
from carpool.service.store.accept_log import LogLine
from carpool.service.store.store import Store
from carpool.testing.reference import plain_loop
from tests.support.daemon_crash import (
    SLOW_TRAINING,
    CrashingDaemon,
    check_journal,
    kill_after,
    outcomes,
    read,
    steps_made,
)

ENTRY = SLOW_TRAINING


def write_jobs(folder: Path, count: int, **args: object) -> Path:
    (folder / "jobs.py").write_text(ENTRY, encoding="utf-8")
    lines = []
    for number in range(count):
        given = ", ".join(f"{key} = {value}" for key, value in {"seed": number, **args}.items())
        lines.append(f'[[job]]\nname = "job-{number}"\nentry = "jobs.py:tiny"\nargs = {{ {given} }}\n')
    path = folder / "jobs.toml"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.fixture
def crashing(tmp_path: Path) -> CrashingDaemon:
    return CrashingDaemon(tmp_path / "state", write_jobs(tmp_path, 3), mark=f"crash-{tmp_path}")


def test_killed_and_started_again_all_jobs_end_once_and_no_step_is_made_twice(
    crashing: CrashingDaemon, tmp_path: Path
) -> None:
    chance = random.Random(5)
    for _ in range(2):
        assert kill_after(crashing.start(), chance.randrange(4, 9))
    assert not kill_after(crashing.start(), 10**9)
    assert crashing.left_behind() == {}
    entries = read(crashing.state)
    jobs = [JobId(f"job-{number}") for number in range(3)]
    check_journal(entries, jobs)
    assert max(entry.mark.epoch for entry in entries) == 3
    assert len({entry.mark.of(LOCAL).life for entry in entries if entry.mark.of(LOCAL).life}) == 1, (
        "one executor outlived all daemons"
    )
    found = outcomes(entries)
    for number, job in enumerate(jobs):
        training = load_training("jobs.py:tiny", {"seed": number, "step_s": 0.0}, folder=tmp_path)
        assert found[job].digest == plain_loop(training).digest
        assert steps_made(crashing.state, job) == dict.fromkeys(range(1, 61), 1)


PATIENCE_S = 90.0
POLICY = """
from dataclasses import dataclass
from carpool.policies.baselines.nonpreemptive import Fifo


@dataclass(frozen=True, slots=True)
class Mine(Fifo):
    pass
"""
ADMIN = Principal("root", Role.ADMIN)


@asynccontextmanager
async def opened(
    folder: Path, *, leave_running: bool = False, policy: str = "", devices: str = "cpu:2", days: float = 0.0
) -> AsyncIterator[DaemonInstance]:
    """A daemon at work, which is stopped in the end."""
    options = ExecutorOptions(mirror_s=0.2, grace_s=0.5, tick_s=0.02, orphan_s=60.0)
    daemon = DaemonInstance.open(
        DaemonOptions(folder, tuple(parse_devices(devices)), "1", policy, "fifo", options=options, checkpoint_days=days)
    )
    try:
        await daemon.start()
        running = asyncio.create_task(daemon.run())
        try:
            yield daemon
        finally:
            daemon.stop(leave_running=leave_running)
            await running
    finally:
        daemon.close()


async def until(daemon: DaemonInstance, found: Callable[[], bool]) -> None:
    """Follow the feed until something holds."""
    async with asyncio.timeout(PATIENCE_S):
        async for _ in daemon.observers.events.feed.listen(0):
            if found():
                return


def steps(daemon: DaemonInstance, job: str) -> float:
    return daemon.observers.accounting.accounts[JobId(job)].done


def lives(state: Path) -> list[int]:
    found = [entry.mark.of(LOCAL).life for entry in read(state) if entry.mark.of(LOCAL).life]
    return list(dict.fromkeys(found))


def test_dead_executors_handovers_and_other_devices_change_no_weight(tmp_path: Path) -> None:
    jobs = read_jobs(write_jobs(tmp_path, 3)).jobs
    state, mine = tmp_path / "state", tmp_path / "mine.py"
    mine.write_text(POLICY)

    async def first() -> None:
        async with opened(state, leave_running=True) as daemon:
            with pytest.raises(InputError, match="another daemon uses"):
                DaemonInstance.open(daemon.options)
            await daemon.loop.submit(jobs)
            await until(daemon, lambda: steps(daemon, "job-0") >= 2)
            os.kill(int((state / "executor" / "executor.pid").read_text()), signal.SIGKILL)
            await daemon.loop.apply(WeightChanged(JobId("job-2"), 3.0))
            life = daemon.store.mark.of(LOCAL).life
            await until(daemon, lambda: daemon.store.mark.of(LOCAL).life > life and steps(daemon, "job-0") >= 2)

    async def second() -> None:
        async with opened(state, leave_running=True, policy=f"{mine}:Mine") as daemon:
            service = SchedulerService(daemon.read_model, daemon.recovered.notes)
            assert daemon.notices == []
            assert service.job(ADMIN, "job-2").weight == 3.0
            assert service.summary(ADMIN).policy == f"{mine}:Mine"

    async def third() -> None:
        async with opened(state, devices="cpu:1") as daemon:
            assert [words.split(" ")[:2] for words in daemon.notices] == [["The", "policy"], ["The", "executor"]]
            assert (daemon.policy_text, len(daemon.names)) == ("fifo", 1)
            await until(daemon, lambda: not daemon.scheduler.jobs)
            assert [view.what for view in SchedulerService(daemon.read_model).jobs(ADMIN).jobs] == ["jobs.py:tiny"] * 3

    asyncio.run(first())
    assert len(lives(state)) == 2, "one was killed, another took its place"
    asyncio.run(second())
    assert len(lives(state)) == 2, "and was claimed by the next daemon"
    mine.unlink()
    asyncio.run(third())
    assert len(lives(state)) == 3, "which left it to one with other devices"
    entries = read(state)
    check_journal(entries, [spec.id for spec, _ in jobs])
    changes = [fact.policy for entry in entries for fact in entry.record.facts if isinstance(fact, PolicyChanged)]
    assert changes == [f"{mine}:Mine", "fifo"]
    found = outcomes(entries)
    for number, (spec, _) in enumerate(jobs):
        training = load_training("jobs.py:tiny", {"seed": number, "step_s": 0.0}, folder=tmp_path)
        assert found[spec.id].digest == plain_loop(training).digest


FAILS = """
from dataclasses import dataclass
from carpool.policies.baselines.nonpreemptive import Fifo


@dataclass(frozen=True)
class Mine(Fifo):
    def plan(self, view):
        if len(view.jobs) > 1:
            raise LookupError("too many")
        return super().plan(view)
"""


def test_a_failing_policy_is_replaced_for_good(tmp_path: Path) -> None:
    jobs = read_jobs(write_jobs(tmp_path, 3)).jobs
    state, mine = tmp_path / "state", tmp_path / "mine.py"
    mine.write_text(FAILS)
    fault = "policy Mine failed: LookupError: too many (mine.py, line 10)"

    async def first() -> None:
        async with opened(state, leave_running=True, policy=f"{mine}:Mine") as daemon:
            await daemon.loop.submit(jobs[:1])
            await until(daemon, lambda: steps(daemon, "job-0") >= 2)
            assert daemon.policy_text == f"{mine}:Mine"
            await daemon.loop.submit(jobs[1:])
            assert (daemon.policy_text, daemon.scheduler.policy_fault) == ("fifo", fault)
            await until(daemon, lambda: steps(daemon, "job-1") >= 2)

    async def second() -> None:
        async with opened(state) as daemon:
            assert daemon.notices == []
            assert (daemon.policy_text, daemon.scheduler.policy_fault) == ("fifo", fault)
            await until(daemon, lambda: not daemon.scheduler.jobs)

    asyncio.run(first())
    asyncio.run(second())
    assert len(lives(state)) == 1
    entries = read(state)
    check_journal(entries, [spec.id for spec, _ in jobs])
    found = outcomes(entries)
    for number, (spec, _) in enumerate(jobs):
        training = load_training("jobs.py:tiny", {"seed": number, "step_s": 0.0}, folder=tmp_path)
        assert found[spec.id].digest == plain_loop(training).digest
        assert steps_made(state, spec.id) == dict.fromkeys(range(1, 61), 1)


def test_a_daemon_that_died_while_it_replaced_an_executor_leaves_no_step_counted_twice(tmp_path: Path) -> None:
    jobs = read_jobs(write_jobs(tmp_path, 1)).jobs
    state = tmp_path / "state"

    async def play() -> None:
        async with opened(state, leave_running=True) as daemon:
            await daemon.loop.submit(jobs)
            await until(daemon, lambda: steps(daemon, "job-0") >= 2)
        await ExecutorSocket(state / "executor").kill_executor()
        died = DaemonInstance.open(daemon.options)
        try:
            await (await died._fleet.start_executor(LOCAL)).leave()  # it comes so far, and no further
        finally:
            died.close()
        async with opened(state) as daemon:
            assert daemon.notices == []
            await until(daemon, lambda: not daemon.scheduler.jobs)

    asyncio.run(play())
    assert len(lives(state)) == 2
    entries = read(state)
    check_journal(entries, [spec.id for spec, _ in jobs])
    losses = [number for number, entry in enumerate(entries) if any(map(_is_loss, entry.record.facts))]
    assert [entries[number].mark.of(LOCAL).life > entries[number - 1].mark.of(LOCAL).life for number in losses] == [
        True
    ]


def _is_loss(fact: object) -> bool:
    return isinstance(fact, NodeLost)


def test_the_next_daemon_knows_the_profile_of_a_training(tmp_path: Path) -> None:
    (job,) = read_jobs(write_jobs(tmp_path, 1)).jobs
    state, one = tmp_path / "state", Placement(((Kind("cpu1"), 1),))

    async def first() -> None:
        async with opened(state) as daemon:
            await daemon.loop.submit([job])
            await until(daemon, lambda: not daemon.scheduler.jobs)

    asyncio.run(first())
    again = ListedJob(replace(job.spec, id=JobId("again")), job.program)
    daemon = DaemonInstance.open(DaemonOptions(state, tuple(parse_devices("cpu:2")), "1", "", "fifo"))
    try:
        daemon._profiles.introduce([again])
        believed = daemon.observers.estimator.first_belief(again.spec, one)
        assert believed.basis.startswith("measured")
        assert believed.rate.mean < 100.0, "a step sleeps for a hundredth of a second"
        assert daemon.observers.estimator.total(again.spec.id) == 60.0
    finally:
        daemon.close()


def test_an_executor_may_die_while_a_commit_is_under_way(tmp_path: Path) -> None:
    jobs = read_jobs(write_jobs(tmp_path, 2)).jobs
    state = tmp_path / "state"

    async def play() -> None:
        async with opened(state) as daemon:
            await daemon.loop.submit(jobs[:1])
            await until(daemon, lambda: steps(daemon, "job-0") >= 2)
            is_renewing, may_end = asyncio.Event(), threading.Event()
            database, renew = daemon.store._opened().database, daemon.loop._hooks.renew
            add = database.add
            assert renew is not None

            def add_slowly(lines: Iterable[LogLine]) -> None:
                add(_held_back(lines, may_end))

            async def renew_and_tell(name: str, reason: str) -> tuple[ExecutorPort, Sequence[Fact]]:
                is_renewing.set()
                return await renew(name, reason)

            database.add = add_slowly  # type: ignore[method-assign]
            daemon.loop._hooks = replace(daemon.loop._hooks, renew=renew_and_tell)
            submitting = asyncio.create_task(daemon.loop.submit(jobs[1:]))
            os.kill(int((state / "executor" / "executor.pid").read_text()), signal.SIGKILL)
            try:
                await is_renewing.wait()
            finally:
                may_end.set()
            await submitting
            await until(daemon, lambda: not daemon.scheduler.jobs)

    asyncio.run(play())
    check_journal(read(state), [spec.id for spec, _ in jobs])


def stop(pid: int) -> None:
    """Stop a process; when this returns, it has stopped."""
    os.kill(pid, signal.SIGSTOP)
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        os.sched_yield()


async def kill_executor_in_hand_of(daemon: DaemonInstance, state: Path, job: str) -> None:
    """Kill the executor, after some progress, as if it were handling a job; returns when there is another one."""
    before, life = steps(daemon, job), daemon.store.mark.of(LOCAL).life
    await until(daemon, lambda: steps(daemon, job) > before)
    pid = int((state / "executor" / "executor.pid").read_text())
    stop(pid)  # or it could clear the marker before it dies
    JobMarker(state / "executor" / "job").set(JobId(job))
    os.kill(pid, signal.SIGKILL)
    await until(daemon, lambda: daemon.store.mark.of(LOCAL).life != life)


def test_a_job_that_kills_its_executor_twice_is_quarantined_and_its_neighbour_finishes(tmp_path: Path) -> None:
    jobs = read_jobs(write_jobs(tmp_path, 2)).jobs
    state = tmp_path / "state"

    async def play() -> None:
        async with opened(state) as daemon:
            await daemon.loop.submit(jobs)
            for _ in range(2):
                await kill_executor_in_hand_of(daemon, state, "job-0")
            await until(daemon, lambda: not daemon.scheduler.jobs)
            accounts = daemon.observers.accounting.accounts
            assert "quarantined" in accounts[JobId("job-0")].error
            assert accounts[JobId("job-1")].phase is Phase.FINISHED

    asyncio.run(play())


async def kill_executor_beside(daemon: DaemonInstance, state: Path, job: str) -> None:
    """Kill the executor, after some progress of a job; returns when there is another one."""
    before, life = steps(daemon, job), daemon.store.mark.of(LOCAL).life
    await until(daemon, lambda: steps(daemon, job) > before)
    os.kill(int((state / "executor" / "executor.pid").read_text()), signal.SIGKILL)
    (state / "executor" / "job").unlink()  # it handled none, as far as the daemon can tell
    await until(daemon, lambda: daemon.store.mark.of(LOCAL).life != life)


def test_an_executor_that_dies_only_while_one_job_runs_dies_twice(tmp_path: Path) -> None:
    jobs = read_jobs(write_jobs(tmp_path, 1, steps=100_000)).jobs
    state = tmp_path / "state"

    async def play() -> None:
        async with opened(state) as daemon:
            await daemon.loop.submit(jobs)
            for _ in range(2):
                await kill_executor_beside(daemon, state, "job-0")
            await until(daemon, lambda: not daemon.scheduler.jobs)
            assert "only this job ran" in daemon.observers.accounting.accounts[JobId("job-0")].error

    asyncio.run(play())


def test_jobs_beside_which_executors_die_again_and_again_are_paused(tmp_path: Path) -> None:
    jobs = read_jobs(write_jobs(tmp_path, 2, steps=100_000)).jobs
    state = tmp_path / "state"

    async def play() -> None:
        async with opened(state) as daemon:
            await daemon.loop.submit(jobs)
            for _ in range(3):
                await kill_executor_beside(daemon, state, "job-0")
            held = daemon.scheduler.jobs
            await until(daemon, lambda: all(each.phase is Phase.PAUSED for each in held.values()))
            assert "one at a time" in daemon.scheduler.why(held[JobId("job-1")])
            await daemon.loop.apply(JobResumed(JobId("job-1")))
            await until(daemon, lambda: held[JobId("job-1")].phase is Phase.RUNNING)

    asyncio.run(play())


def _held_back(lines: Iterable[LogLine], may_end: threading.Event) -> Iterator[LogLine]:
    """Lines that are written within a transaction which ends only when it may."""
    yield from lines
    may_end.wait(PATIENCE_S)


def test_a_listener_learns_after_a_restart_that_it_missed_events(tmp_path: Path) -> None:
    setup = DaemonOptions(tmp_path, tuple(parse_devices("cpu:1")), "1", "", "fifo")

    async def life(after: int | None) -> int:
        daemon = DaemonInstance.open(setup)
        try:
            await daemon._fleet._claims(LOCAL).next_durable()
            feed = daemon.observers.events.feed
            for _ in range(3 if after is None else 1):
                feed.add(0.0, "told", "a")
            if after is not None:
                feed.close()
                assert [event.kind async for event in feed.listen(after)] == ["missed", "told"]
            return feed.last
        finally:
            daemon.close()

    asyncio.run(life(asyncio.run(life(None))))


ADA = Principal("ada")
COMMANDS = """
[[job]]
name = "short"
command = ["sleep", "600"]

[[job]]
name = "long"
command = ["sleep", "600"]
"""


def test_queries_work_after_a_restart_with_a_trimmed_journal(tmp_path: Path) -> None:
    state, path = tmp_path / "state", tmp_path / "jobs.toml"
    path.write_text(COMMANDS, encoding="utf-8")
    jobs = read_jobs(path).jobs

    async def play() -> None:
        async with opened(state, leave_running=True) as daemon:
            service = SchedulerService(daemon.read_model)
            await service.submit(ADA, jobs)
            await service.pause(ADA, "short")
            await service.resume(ADA, "short")
            await service.cancel(ADA, "short")
        with closing(Store.open(state, DaemonInstance.header(daemon.options))) as store:
            store.forget_before(_resumed_in(store))
        short, long = (_with_old_checkpoints(state, spec.id) for spec, _ in jobs)
        async with opened(state, days=1.0) as daemon:
            service, feed = SchedulerService(daemon.read_model, daemon.recovered.notes), daemon.observers.events.feed
            assert [[line.job for line in decision.changes] for decision in service.decisions(ADMIN)] == [["short"]]
            assert [line.job for line in service.decisions(ADA)[0].changes] == [""], "whose it was is forgotten"
            assert [span.job for span in service.timeline(ADA, 0.0, 2e10)] == ["", "long"]
            assert [view.id for view in service.jobs(ADA).jobs] == ["long"]
            assert [each.name for each in service.job(ADA, "long").holds] == ["cpu:1"]
            assert await service.submit(ADA, jobs[:1]) == ("short-2",)
            await service.set_weight(ADA, "long", 2.0)
            await until(daemon, lambda: not short.exists())
            assert long.exists()
            feed.close()
            told = [event.kind async for event in service.events(ADA, 0) if event.job == "long"]
            assert told == ["changed"]

    asyncio.run(play())


def _with_old_checkpoints(state: Path, job: JobId) -> Path:
    folder = JobFolder(state, job).checkpoints
    folder.mkdir(parents=True, exist_ok=True)
    os.utime(folder, (0.0, 0.0))
    return folder


def _resumed_in(store: Store) -> int:
    [number] = [
        entry.number for entry in store.entries() if any(isinstance(fact, JobResumed) for fact in entry.record.facts)
    ]
    return number
