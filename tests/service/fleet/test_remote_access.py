"""Jobs on other machines: moved, cut off, stopped and killed, each ends once with the weights of a local run."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from carpool.backends.executors import ExecutorGroup, ExecutorPort, Introduction
from carpool.core.errors import InputError
from carpool.core.messages import Assign, Fact, NodeDrained, Release
from carpool.core.model import Allocation, JobId, Phase
from carpool.jobs.job_file import ListedJob, read_jobs
from carpool.jobs.program import Program
from carpool.runtime.executor.job_guard import JobMarker
from carpool.runtime.executor.reports import Gone, HandedOver
from carpool.runtime.worker.entry_loader import load_training
from carpool.service.daemon.bootstrap import DaemonInstance
from carpool.service.fleet.remote_access import AbsentMember, check_jobs, remote_members
from carpool.testing.reference import plain_loop
from tests.support.daemon_crash import SLOW_TRAINING, check_journal, outcomes, read, steps_made
from tests.support.fake_executor import FakeExecutor
from tests.support.fleet_rig import AgentProcess, Link, ShiftedClock, fleet_daemon, hosts_of, until

LEASE_S = 3.0
LONG_LEASE_S = 300.0  # ends by no delay of a loaded machine


def jobs_in(folder: Path, count: int, steps: int = 60, step_s: float = 0.01, extra: str = "") -> tuple[ListedJob, ...]:
    folder.mkdir(exist_ok=True)
    (folder / "jobs.py").write_text(SLOW_TRAINING, encoding="utf-8")
    tables = [
        f'[[job]]\nname = "job-{number}"\nentry = "jobs.py:tiny"\nexact = true\n'
        f"args = {{ seed = {number}, steps = {steps}, step_s = {step_s} }}\n{extra}"
        for number in range(count)
    ]
    (folder / "jobs.toml").write_text("\n".join(tables), encoding="utf-8")
    return read_jobs(folder / "jobs.toml").jobs


def digest_of(folder: Path, job: ListedJob) -> str:
    args = {**job.program.args, "step_s": 0.0}
    return plain_loop(load_training("jobs.py:tiny", args, folder=folder), shards=job.program.shards).digest


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[list[AgentProcess]]:
    started = [AgentProcess(tmp_path, name) for name in ("left", "right", "third")]
    yield started
    for each in started:
        each.close()


def has_lost(daemon: DaemonInstance) -> bool:
    return bool(daemon.scheduler.snapshot().occupancy.lost)


def placed(daemon: DaemonInstance, job: str) -> str:
    """The member that a job is assigned to; empty: none."""
    held = daemon.scheduler.jobs[JobId(job)].desired if JobId(job) in daemon.scheduler.jobs else None
    return "" if held is None else daemon.scheduler.cluster.node_of(next(iter(held.devices()))).name


def done(daemon: DaemonInstance, job: str) -> float:
    return daemon.observers.accounting.accounts[JobId(job)].done


def test_thirty_jobs_on_three_members_one_killed_and_rejoined(tmp_path: Path, agents: list[AgentProcess]) -> None:
    for each in agents:
        each.start()
    jobs = jobs_in(tmp_path / "code", 30, steps=20)
    state = tmp_path / "state"
    clock = ShiftedClock()
    lost: set[str] = set()

    async def main() -> None:
        async with fleet_daemon(state, hosts_of(*agents, lease_s=LONG_LEASE_S), clock=clock) as daemon:
            await daemon.loop.submit(jobs)
            await until(daemon, lambda: any(placed(daemon, job.spec.id) == "right" for job in jobs))
            lost.update(job.spec.id for job in jobs if placed(daemon, job.spec.id) == "right")
            agents[1].kill()
            clock.advance(2 * LONG_LEASE_S)
            await until(daemon, lambda: has_lost(daemon))
            agents[1].start()
            await until(daemon, lambda: not has_lost(daemon))
            await until(daemon, lambda: not daemon.scheduler.jobs)

    asyncio.run(main())
    entries = read(state)
    check_journal(entries, [job.spec.id for job in jobs])
    found = outcomes(entries)
    assert {job.spec.id: found[job.spec.id].digest for job in jobs} == {
        job.spec.id: digest_of(tmp_path / "code", job) for job in jobs
    }
    interrupted = {
        change.job
        for entry in entries
        if entry.record.planned is not None
        for change in entry.record.planned.changes
        if change.allocation is None
    }
    assert not interrupted, "jobs elsewhere are never released"
    again = {job.spec.id for job in jobs if steps_made(state, job.spec.id) != dict.fromkeys(range(1, 21), 1)}
    assert again <= lost, "only jobs of the killed member made steps again"


def cut_off(agent: AgentProcess, link: Link, trouble: str) -> int:
    """Let a member fall silent in one of four ways; the process of its executor."""
    executor = agent.executor_pid
    assert executor is not None
    if trouble == "link":
        link.cut()
    if trouble in ("agent", "both"):
        agent.send(signal.SIGSTOP)
    if trouble in ("executor", "both"):
        os.kill(executor, signal.SIGSTOP)  # its workers are not stopped
    return executor


@pytest.mark.waits
def test_members_that_are_cut_off_past_their_lease_write_nothing(tmp_path: Path) -> None:
    """With both stopped, only the worker itself can know that its lease has ended."""
    troubles = ("link", "agent", "executor", "both")
    agents = {name: AgentProcess(tmp_path, name) for name in troubles}
    survivor = AgentProcess(tmp_path, "survivor", devices="cpu:4")
    jobs = jobs_in(tmp_path / "code", len(troubles), steps=300, step_s=0.02, extra="checkpoint_every = 1\n")
    state = tmp_path / "state"

    before: dict[str, bytes] = {}  # what each had written when it counted as lost

    def log_of(name: str) -> bytes:
        return agents[name].log_of(f"job-{troubles.index(name)}")

    def are_all_lost(daemon: DaemonInstance) -> bool:
        nodes = daemon.scheduler.cluster.nodes
        for node in daemon.scheduler.snapshot().occupancy.lost:
            before.setdefault(nodes[node].name, log_of(nodes[node].name))
        return before.keys() == set(troubles)

    async def main() -> None:
        links = {name: await Link(each.port).open() for name, each in agents.items()}
        ports = {name: link.port for name, link in links.items()}
        hosts = hosts_of(*agents.values(), survivor, lease_s=LEASE_S, ports=ports)
        try:
            async with fleet_daemon(state, hosts) as daemon:
                await daemon.loop.submit(jobs)
                await until(daemon, lambda: all(done(daemon, job.spec.id) >= 5 for job in jobs))
                assert [placed(daemon, job.spec.id) for job in jobs] == list(troubles)
                executors = {name: cut_off(each, links[name], name) for name, each in agents.items()}
                await until(daemon, lambda: are_all_lost(daemon))
                await until(daemon, lambda: not daemon.scheduler.jobs)
                after = {name: log_of(name) or before[name] for name in troubles}  # deleted when a member returns
                assert after == before, "they stood still once they counted as lost"
                links["link"].heal()
                for name in ("agent", "both"):
                    agents[name].send(signal.SIGCONT)
                await until(daemon, lambda: not has_lost(daemon))
                now = {name: each.executor_pid for name, each in agents.items()}
                assert all(now[name] != executors[name] for name in troubles), "what they ran is gone"
        finally:
            for link in links.values():
                await link.close()

    try:
        for each in (*agents.values(), survivor):
            each.start()
        asyncio.run(main())
    finally:
        for each in (*agents.values(), survivor):
            each.close()
    entries = read(state)
    check_journal(entries, [job.spec.id for job in jobs])
    found = outcomes(entries)
    assert {job.spec.id: found[job.spec.id].digest for job in jobs} == {
        job.spec.id: digest_of(tmp_path / "code", job) for job in jobs
    }


def test_a_short_cut_interrupts_no_job_and_a_released_job_moves_with_its_state(
    tmp_path: Path, agents: list[AgentProcess]
) -> None:
    left, right, _ = agents
    left.start()
    right.start()
    (job,) = jobs_in(tmp_path / "code", 1, steps=150)
    state = tmp_path / "state"

    async def main() -> None:
        link = await Link(left.port).open()
        hosts = hosts_of(left, right, lease_s=20.0, ports={"left": link.port})
        try:
            async with fleet_daemon(state, hosts) as daemon:
                await daemon.loop.submit([job])
                await until(daemon, lambda: done(daemon, "job-0") >= 5)
                link.drop()
                await until(daemon, lambda: done(daemon, "job-0") >= 20)
                assert placed(daemon, "job-0") == "left"
                assert not has_lost(daemon), "the lease had not ended"
                await daemon.loop.apply(NodeDrained(daemon.scheduler.cluster.nodes[0].id))
                await until(daemon, lambda: placed(daemon, "job-0") == "right")
                await until(daemon, lambda: not daemon.scheduler.jobs)
        finally:
            await link.close()

    asyncio.run(main())
    entries = read(state)
    check_journal(entries, [job.spec.id])
    assert steps_made(state, job.spec.id) == dict.fromkeys(range(1, 151), 1), "no step is made twice"
    assert outcomes(entries)[job.spec.id].digest == digest_of(tmp_path / "code", job)


def test_a_job_that_kills_the_executor_of_a_member_twice_is_quarantined(
    tmp_path: Path, agents: list[AgentProcess]
) -> None:
    left = agents[0]
    left.start()
    jobs = jobs_in(tmp_path / "code", 2, steps=100)

    async def kill_in_hand_of(daemon: DaemonInstance, job: str) -> None:
        before, life = done(daemon, job), daemon.store.mark.of("left").life
        await until(daemon, lambda: done(daemon, job) > before)
        assert left.executor_pid is not None
        os.kill(left.executor_pid, signal.SIGSTOP)  # otherwise it may replace the marker before it is killed
        JobMarker(left.state / "executor" / "job").set(JobId(job))
        os.kill(left.executor_pid, signal.SIGKILL)
        await until(daemon, lambda: daemon.store.mark.of("left").life != life and not has_lost(daemon))

    async def main() -> None:
        async with fleet_daemon(tmp_path / "state", hosts_of(left, lease_s=LONG_LEASE_S)) as daemon:
            await daemon.loop.submit(jobs)
            for _ in range(2):
                await kill_in_hand_of(daemon, "job-0")
            await until(daemon, lambda: not daemon.scheduler.jobs)
            accounts = daemon.observers.accounting.accounts
            assert "quarantined" in accounts[JobId("job-0")].error
            assert accounts[JobId("job-1")].phase is Phase.FINISHED

    asyncio.run(main())


def test_a_daemon_starts_without_a_host_that_joins_later(tmp_path: Path, agents: list[AgentProcess]) -> None:
    left, right, _ = agents
    left.start()
    right.start()
    right.close()
    jobs = jobs_in(tmp_path / "code", 2, steps=20)
    state, hosts = tmp_path / "state", hosts_of(left, right, lease_s=LONG_LEASE_S)
    with pytest.raises(InputError, match="cannot be reached"):
        asyncio.run(remote_members(hosts, state))

    async def main() -> None:
        async with fleet_daemon(state, hosts, may_be_away=True) as daemon:
            await daemon.loop.submit(jobs[:1])
            await until(daemon, lambda: done(daemon, "job-0") >= 1)
            assert [node.name for node in daemon.scheduler.cluster.nodes] == ["left"]
            right.start()
            await until(daemon, lambda: len(daemon.scheduler.cluster.nodes) == 2)
            await daemon.loop.apply(NodeDrained(daemon.scheduler.cluster.nodes[0].id))
            await daemon.loop.submit(jobs[1:])
            await until(daemon, lambda: placed(daemon, "job-1") == "right")
            await until(daemon, lambda: not daemon.scheduler.jobs)

    asyncio.run(main())
    found = outcomes(read(state))
    assert {job.spec.id: found[job.spec.id].digest for job in jobs} == {
        job.spec.id: digest_of(tmp_path / "code", job) for job in jobs
    }
    assert (state / "jobs" / "job-1" / "checkpoints").is_dir()


def test_jobs_go_on_after_the_daemon_is_restarted_and_a_link_breaks(tmp_path: Path, agents: list[AgentProcess]) -> None:
    left = agents[0]
    left.start()
    (job,) = jobs_in(tmp_path / "code", 1, steps=300, extra="checkpoint_every = 1\n")
    state = tmp_path / "state"

    async def main() -> None:
        link = await Link(left.port).open()
        hosts = hosts_of(left, lease_s=LONG_LEASE_S, ports={"left": link.port})
        try:
            async with fleet_daemon(state, hosts, leave_running=True) as daemon:
                await daemon.loop.submit([job])
                await until(daemon, lambda: done(daemon, "job-0") >= 5)
            executor = left.executor_pid
            async with fleet_daemon(state, hosts) as daemon:
                before = done(daemon, "job-0")
                await until(daemon, lambda: done(daemon, "job-0") > before)
                link.drop()
                await until(daemon, lambda: not daemon.scheduler.jobs)
                assert left.executor_pid == executor
        finally:
            await link.close()

    asyncio.run(main())
    entries = read(state)
    check_journal(entries, [job.spec.id])
    assert steps_made(state, job.spec.id) == dict.fromkeys(range(1, 301), 1), "no step is made twice"
    assert outcomes(entries)[job.spec.id].digest == digest_of(tmp_path / "code", job)


def test_reports_of_others_are_taken_in_while_an_executor_is_replaced(
    tmp_path: Path, agents: list[AgentProcess]
) -> None:
    left, right, _ = agents
    left.start()
    right.start()
    jobs = jobs_in(tmp_path / "code", 2, steps=100)

    async def main() -> None:
        async with fleet_daemon(tmp_path / "state", hosts_of(left, right, lease_s=LONG_LEASE_S)) as daemon:
            renew, may_renew = daemon.loop._hooks.renew, asyncio.Event()
            assert renew is not None

            async def renew_later(name: str, reason: str) -> tuple[ExecutorPort, Sequence[Fact]]:
                await may_renew.wait()
                return await renew(name, reason)

            daemon.loop._hooks = replace(daemon.loop._hooks, renew=renew_later)
            await daemon.loop.submit(jobs)
            await until(daemon, lambda: all(done(daemon, job.spec.id) >= 1 for job in jobs))
            executor = left.executor_pid
            assert executor is not None
            os.kill(executor, signal.SIGKILL)
            elsewhere = next(job.spec.id for job in jobs if placed(daemon, job.spec.id) == "right")
            await until(daemon, lambda: elsewhere not in daemon.scheduler.jobs)
            may_renew.set()
            await until(daemon, lambda: not daemon.scheduler.jobs)

    asyncio.run(main())
    found = outcomes(read(tmp_path / "state"))
    assert all(found[job.spec.id].digest == digest_of(tmp_path / "code", job) for job in jobs)


def test_a_member_that_is_away_does_not_keep_the_loop_from_ending() -> None:
    async def never() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        absent = AbsentMember(never)
        receiving = asyncio.create_task(absent.receive())
        await absent.stop(checkpoint=True)
        assert isinstance(await receiving, Gone)

    asyncio.run(main())


def test_an_order_sent_after_its_member_was_lost_does_not_keep_the_job_from_starting_elsewhere() -> None:
    """The order waits for the journal; meanwhile the member is replaced by the port that stands for it."""

    async def never() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        job, other = JobId("a"), FakeExecutor({"a": 1})
        absent = AbsentMember(never)
        group = ExecutorGroup({"left": absent, "right": other}, lambda device: "left" if device == 0 else "right")
        program = {job: Introduction(Program("train.py:small"), resume=True)}
        moved = Assign(job, Allocation.exclusive((range(1, 2),)), 3)
        group.carry([Assign(job, Allocation.exclusive((range(1),)), 1), Release(job, 2), moved], program)
        report = await asyncio.wait_for(absent.receive(), 30.0)
        assert isinstance(report, HandedOver)
        group.handed_over("left", report.job)
        assert other.orders == [moved]
        receiving = asyncio.create_task(absent.receive())
        await absent.leave()
        assert isinstance(await receiving, Gone)

    asyncio.run(main())


def test_what_cannot_work_is_refused_before_anything_starts(tmp_path: Path, agents: list[AgentProcess]) -> None:
    left = agents[0]
    left.start()
    state = tmp_path / "state"
    hosts = hosts_of(left)
    jobs = jobs_in(tmp_path / "code", 1)

    def refused(**changes: object) -> str:
        from dataclasses import replace

        wrong = replace(hosts, hosts=(replace(hosts.hosts[0], **changes),))  # type: ignore[arg-type]
        with pytest.raises(InputError) as error:
            asyncio.run(remote_members(wrong, state))
        return str(error.value)

    assert "cannot be reached" in refused(port=1)
    assert "wrong token" in refused(token="f" * 32)
    assert "TLS" in refused(tls=True)
    assert not (left.state / "executor").exists(), "nothing was started"
    big = tmp_path / "code" / "big.bin"
    big.write_bytes(os.urandom(1 << 20))
    with pytest.raises(InputError, match="max_code"):
        asyncio.run(check_jobs(hosts.__class__(hosts.hosts, max_code_bytes=1 << 19), state, jobs))
    assert asyncio.run(check_jobs(hosts, state, jobs)) is None


def test_jobs_of_a_machine_that_is_no_member_any_more_resume_on_the_others(
    tmp_path: Path, agents: list[AgentProcess]
) -> None:
    left, right, _ = agents
    left.start()
    right.start()
    (job,) = jobs_in(tmp_path / "code", 1, steps=150, extra="checkpoint_every = 1\n")
    state = tmp_path / "state"

    async def main() -> None:
        async with fleet_daemon(state, hosts_of(left, right, lease_s=LONG_LEASE_S)) as daemon:
            await daemon.loop.submit([job])
            await until(daemon, lambda: done(daemon, "job-0") >= 5)
            assert placed(daemon, "job-0") == "left"
        async with fleet_daemon(state, hosts_of(right, lease_s=LONG_LEASE_S)) as daemon:
            await until(daemon, lambda: not daemon.scheduler.jobs)

    asyncio.run(main())
    assert outcomes(read(state))[job.spec.id].digest == digest_of(tmp_path / "code", job)
    assert steps_made(state, job.spec.id) == dict.fromkeys(range(1, 151), 1), "it went on from its checkpoint"
