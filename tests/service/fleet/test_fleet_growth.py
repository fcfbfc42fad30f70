"""Members that come and go while a daemon runs, with an engine whose machines are agents on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from carpool.core.errors import InputError
from carpool.core.messages import JobFailed, NodeDrained, NodeUndrained
from carpool.jobs.hosts_file import Host
from carpool.jobs.job_file import ListedJob, read_jobs
from carpool.runtime.remote.remote_link import HostUnreachable
from carpool.runtime.worker.entry_loader import load_training
from carpool.service.daemon.bootstrap import DaemonInstance, DaemonOptions
from carpool.service.fleet.engine_members import EngineMembers, examine_engine
from carpool.service.fleet.remote_access import check_jobs
from carpool.testing.reference import plain_loop
from tests.support.daemon_crash import SLOW_TRAINING, check_journal, outcomes, read, steps_made
from tests.support.fleet_rig import OPTIONS, PATIENCE_S, TOKEN, AgentProcess, ShiftedClock

LEASE_S = 300.0


class AgentsEngine:
    """Machines that a test adds; each has an agent while the scheduler uses it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.agents: dict[str, AgentProcess] = {}
        self.requested = 0
        self.left_running: Collection[str] = ()

    def add(self, name: str) -> None:
        self.agents[name] = AgentProcess(self._folder, name)

    def is_used(self, name: str) -> bool:
        return self.agents[name].process is not None

    async def find(self) -> Sequence[str]:
        return tuple(self.agents)

    async def start(self, name: str) -> Host:
        if name not in self.agents:
            raise HostUnreachable("gone")
        if not self.is_used(name):
            self.agents[name].start()
        return Host(name, "127.0.0.1", self.agents[name].port, TOKEN, tls=False)

    async def release(self, name: str) -> None:
        self.agents[name].close()

    async def request(self, nodes: int) -> None:
        self.requested = nodes

    def close(self, *, keep: Callable[[str], bool] = lambda name: False) -> None:
        for agent in self.agents.values():
            agent.close()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[AgentsEngine]:
    with closing(AgentsEngine(tmp_path)) as engine:
        engine.add("left")
        yield engine


STEPS = 40


def job_in(folder: Path) -> ListedJob:
    """A job that waits after its tenth step until the file `gate` exists."""
    folder.mkdir()
    (folder / "jobs.py").write_text(SLOW_TRAINING, encoding="utf-8")
    args = f'{{ seed = 1, gate = "{folder / "gate"}", steps = {STEPS}, at = 10 }}'
    table = f'[[job]]\nname = "job"\nentry = "jobs.py:gated"\nexact = true\ncheckpoint_every = 1\nargs = {args}\n'
    (folder / "jobs.toml").write_text(table, encoding="utf-8")
    (job,) = read_jobs(folder / "jobs.toml").jobs
    return job


def digest_alone(folder: Path, job: ListedJob) -> str:
    training = load_training(job.program.entry, job.program.args, folder=folder)
    return plain_loop(training, shards=job.program.shards).digest


def has_begun(state: Path) -> bool:
    log = state / "jobs" / "job" / "log"
    return log.is_file() and b"step" in log.read_bytes()


async def become(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not holds():  # noqa: ASYNC110 - engines have no events
            await asyncio.sleep(0.02)


def live(daemon: DaemonInstance) -> set[str]:
    lost = daemon.scheduler.snapshot().occupancy.lost
    return {node.name for node in daemon.scheduler.cluster.nodes if node.id not in lost}


def test_a_machine_joins_and_a_drained_one_is_released_until_it_is_wanted_again(
    tmp_path: Path, engine: AgentsEngine
) -> None:
    job, state = job_in(tmp_path / "code"), tmp_path / "state"

    async def main() -> None:
        source = EngineMembers(engine, state, lease_s=LEASE_S)
        _, members = await source.first()
        options = DaemonOptions(state, (), "1", "fifo", "fifo", options=OPTIONS, members=members, source=source)
        with closing(DaemonInstance.open(options)) as daemon:
            await daemon.start()
            running = asyncio.create_task(daemon.run())
            await daemon.loop.submit([job])
            await become(lambda: has_begun(state))
            engine.add("right")
            await become(lambda: live(daemon) == {"left", "right"})
            left = next(node for node in daemon.scheduler.cluster.nodes if node.name == "left")
            await daemon.loop.apply(NodeDrained(left.id))
            (tmp_path / "code" / "gate").touch()
            await become(lambda: not engine.is_used("left"))
            assert live(daemon) == {"right"}
            await daemon.loop.apply(NodeUndrained("left"))
            assert live(daemon) == {"right"}, "a released machine has no devices yet"
            await become(lambda: live(daemon) == {"left", "right"})
            await become(lambda: not daemon.scheduler.jobs)
            daemon.stop()
            await running

    asyncio.run(main())
    entries = read(state)
    check_journal(entries, [job.spec.id])
    assert steps_made(state, job.spec.id) == dict.fromkeys(range(1, STEPS + 1), 1), "no step is made twice"
    assert outcomes(entries)[job.spec.id].digest == digest_alone(tmp_path / "code", job)


def test_a_node_that_is_gone_when_the_daemon_restarts_is_lost(tmp_path: Path, engine: AgentsEngine) -> None:
    job, state = job_in(tmp_path / "code"), tmp_path / "state"

    async def use(name: str) -> None:
        source = EngineMembers(engine, state, lease_s=LEASE_S)
        _, members = await source.first()
        options = DaemonOptions(state, (), "1", "fifo", "fifo", options=OPTIONS, members=members, source=source)
        with closing(DaemonInstance.open(options)) as daemon:
            await daemon.start()
            running = asyncio.create_task(daemon.run())
            if name == "left":
                await daemon.loop.submit([job])
                await become(lambda: has_begun(state))
                (tmp_path / "code" / "gate").touch()  # it may end here, or stop and resume
            else:
                await become(lambda: not daemon.scheduler.jobs)
            assert live(daemon) == {name}
            daemon.stop()
            await running

    asyncio.run(use("left"))
    engine.agents.pop("left").close()
    engine.add("right")
    asyncio.run(use("right"))
    assert outcomes(read(state))[job.spec.id].digest == digest_alone(tmp_path / "code", job)


def not_yet(clock: ShiftedClock) -> bool:
    """Let another lease pass: the last answer of an agent may come while it ends."""
    clock.advance(LEASE_S)
    return False


def test_machines_that_come_and_go_under_new_names_do_not_accumulate(tmp_path: Path, engine: AgentsEngine) -> None:
    job, state, clock = job_in(tmp_path / "code"), tmp_path / "state", ShiftedClock()
    (tmp_path / "code" / "gate").touch()

    async def main() -> None:
        source = EngineMembers(engine, state, lease_s=LEASE_S, clock=clock)
        _, members = await source.first()
        options = DaemonOptions(state, (), "1", "fifo", "fifo", options=OPTIONS, members=members, source=source)
        with closing(DaemonInstance.open(options)) as daemon:
            await daemon.start()
            running = asyncio.create_task(daemon.run())
            there = {"left"}
            for number in range(3):
                engine.add(f"pod-{number}")
                there |= {f"pod-{number}"}
                await become(lambda: live(daemon) == there)  # noqa: B023
                gone = "left" if number == 0 else f"pod-{number - 1}"
                engine.agents.pop(gone).kill()
                there -= {gone}
                await become(lambda: live(daemon) == there or not_yet(clock))  # noqa: B023
                await become(lambda: not source.gone())  # it is forgotten
            assert {node.name for node in daemon.scheduler.cluster.nodes} == {"pod-1", "pod-2"}
            await daemon.loop.submit([job])
            await become(lambda: not daemon.scheduler.jobs)
            engine.add("left")
            await become(lambda: live(daemon) == {"left", "pod-2"})
            daemon.stop()
            await running

    asyncio.run(main())
    entries = read(state)
    check_journal(entries, [job.spec.id])
    assert outcomes(entries)[job.spec.id].digest == digest_alone(tmp_path / "code", job)


def test_code_above_the_limit_of_the_engine_is_refused(tmp_path: Path, engine: AgentsEngine) -> None:
    job, state = job_in(tmp_path / "code"), tmp_path / "state"

    async def main() -> None:
        source = EngineMembers(engine, state, lease_s=LEASE_S, max_code_bytes=100)
        hosts, members = await source.first()
        with pytest.raises(InputError, match="the limit for code"):
            await check_jobs(hosts, state, [job])
        options = DaemonOptions(state, (), "1", "fifo", "fifo", options=OPTIONS, members=members, source=source)
        with closing(DaemonInstance.open(options)) as daemon:
            await daemon.start()
            running = asyncio.create_task(daemon.run())
            await daemon.loop.submit([job])
            await become(lambda: not daemon.scheduler.jobs)
            daemon.stop()
            await running

    asyncio.run(main())
    (failed,) = [fact for entry in read(state) for fact in entry.record.facts if isinstance(fact, JobFailed)]
    assert "the limit for code" in failed.error


def test_doctor_ends_only_what_it_started(engine: AgentsEngine) -> None:
    engine.add("right")
    engine.agents["left"].start()
    engine.left_running = {"left"}
    found = asyncio.run(examine_engine(engine))
    assert [(each.name, each.is_there) for each in found] == [("left", True), ("right", True)]
    assert [engine.is_used(name) for name in ("left", "right")] == [True, False]


def test_machines_of_another_scheduler_are_refused(tmp_path: Path, engine: AgentsEngine) -> None:
    async def main() -> None:
        state = tmp_path / "state"
        source = EngineMembers(engine, state)
        _, members = await source.first()
        options = DaemonOptions(state, (), "1", "fifo", "fifo", options=OPTIONS, members=members, source=source)
        with closing(DaemonInstance.open(options)) as daemon:
            await daemon.start()
            running = asyncio.create_task(daemon.run())
            with pytest.raises(InputError, match="used by another scheduler"):
                await EngineMembers(engine, tmp_path / "other").first()
            daemon.stop()
            await running

    asyncio.run(main())
