"""Jobs on real Ray clusters: over three raylets, through a lost and a joined one, and with Ray's autoscaler."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from carpool.core.messages import NodeDrained
from carpool.core.model import JobId
from carpool.jobs.job_file import ListedJob, read_jobs
from carpool.runtime.state.checkpoint import load
from carpool.runtime.worker.entry_loader import load_training
from carpool.service.daemon.bootstrap import DaemonInstance
from carpool.testing.reference import plain_loop
from tests.support.daemon_crash import SLOW_TRAINING, CrashingDaemon, check_journal, outcomes, read, steps_made
from tests.support.fleet_rig import ShiftedClock, until
from tests.support.ray_rig import (
    ENVIRONMENT,
    RayletCluster,
    RestartableCluster,
    autoscaling_cluster,
    become,
    ray_daemon,
    restartable_cluster,
    three_raylets,
)

pytest.importorskip("ray", reason="needs the extra ray")

LEASE_S = 300.0  # ends by no delay of a loaded machine
EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
ONE_STEP = """
import torch
from carpool.runtime.engine.stop_criteria import Stop
from dataclasses import replace
from jobs import tiny

def one_step():
    training = tiny(seed=5, steps=1, step_s=0.0)
    for module in training.model:
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0  # masks are drawn per device
    return replace(training, optimizer=torch.optim.SGD(training.model.parameters(), lr=1.0))
"""


@pytest.fixture(autouse=True)
def no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let clusters and drivers use no token, whether or not this user has one."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")


@pytest.fixture(autouse=True)
def _nothing_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """All processes of a test end with it, also those of a raylet that was killed."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CARPOOL_TEST", str(tmp_path))
    yield
    processes = CrashingDaemon(tmp_path, tmp_path, mark=str(tmp_path))
    asyncio.run(become(lambda: not processes.left_behind()))


def wide_jobs(folder: Path) -> tuple[ListedJob, ...]:
    """Over three nodes: an example in exact mode, and one step in default mode."""
    (folder / "digits.py").write_bytes((EXAMPLES / "digits.py").read_bytes())
    (folder / "one_step.py").write_text(ONE_STEP, encoding="utf-8")
    across = "devices = 3\nmax_nodes = 3\n"
    small = "args = { channels = 4, epochs = 1 }\nexact = true\n"
    tables = [
        f'[[job]]\nname = "digits"\nentry = "digits.py:cnn"\n{small}{across}',
        f'[[job]]\nname = "step"\nentry = "one_step.py:one_step"\n{across}',
    ]
    (folder / "wide.toml").write_text("\n".join(tables), encoding="utf-8")
    return read_jobs(folder / "wide.toml").jobs


def gated_jobs(folder: Path, count: int, gate: Path) -> tuple[ListedJob, ...]:
    """Jobs that wait after their third step until a file exists: nothing depends on how quick they are."""
    folder.mkdir(exist_ok=True)
    (folder / "jobs.py").write_text(SLOW_TRAINING, encoding="utf-8")
    tables = [
        f'[[job]]\nname = "job-{number}"\nentry = "jobs.py:gated"\nexact = true\n'
        f'args = {{ seed = {number}, gate = "{gate}" }}\n'
        for number in range(count)
    ]
    (folder / "jobs.toml").write_text("\n".join(tables), encoding="utf-8")
    return read_jobs(folder / "jobs.toml").jobs


def digest_alone(folder: Path, job: ListedJob) -> str:
    training = load_training(job.program.entry, job.program.args, folder=folder)
    return plain_loop(training, shards=job.program.shards).digest


def node_of(daemon: DaemonInstance, job: str) -> str:
    held = daemon.scheduler.jobs[JobId(job)].desired if JobId(job) in daemon.scheduler.jobs else None
    return "" if held is None else daemon.scheduler.cluster.node_of(next(iter(held.devices()))).name


def live_nodes(daemon: DaemonInstance) -> list[str]:
    lost = daemon.scheduler.snapshot().occupancy.lost
    return [node.name for node in daemon.scheduler.cluster.nodes if node.id not in lost]


def not_yet(clock: ShiftedClock) -> bool:
    """Let another lease pass: the last answer of an agent may come while it ends."""
    clock.advance(LEASE_S)
    return False


@pytest.mark.slow
def test_jobs_over_three_raylets_of_which_one_is_killed_while_another_joins(tmp_path: Path) -> None:
    state, gate, clock = tmp_path / "state", tmp_path / "gate", ShiftedClock()
    jobs, wide = gated_jobs(tmp_path / "code", 30, gate), wide_jobs(tmp_path / "code")
    lost_devices: set[int] = set()

    async def main(cluster: RayletCluster, raylet: list[str]) -> None:
        async with ray_daemon(state, cluster.address, lease_s=LEASE_S, clock=clock) as (daemon, engine):
            assert len(live_nodes(daemon)) == 3
            await daemon.loop.submit(wide)
            await until(daemon, lambda: not daemon.scheduler.jobs)
            await daemon.loop.submit(jobs)
            await asyncio.to_thread(cluster.add)
            await until(daemon, lambda: len(live_nodes(daemon)) == 4)
            victim = next(name for name in live_nodes(daemon) if engine.node_id(name) == raylet[0])
            await until(daemon, lambda: any(node_of(daemon, job.spec.id) == victim for job in jobs))
            lost_devices.update(*[node.devices for node in daemon.scheduler.cluster.nodes if node.name == victim])
            await asyncio.to_thread(cluster.kill, raylet[0])
            gate.touch()  # jobs of the killed raylet stop at the end of their step, and only then its agent ends
            await become(lambda: victim not in live_nodes(daemon) or not_yet(clock))
            await until(daemon, lambda: not daemon.scheduler.jobs)

    with three_raylets() as (cluster, raylet):
        asyncio.run(main(cluster, raylet))
    entries = read(state)
    check_journal(entries, [job.spec.id for job in (*wide, *jobs)])
    found = outcomes(entries)
    exact = [job for job in (*wide, *jobs) if job.program.exact]
    assert {job.spec.id: found[job.spec.id].digest for job in exact} == {
        job.spec.id: digest_alone(tmp_path / "code", job) for job in exact
    }
    training = load_training("one_step.py:one_step", {}, folder=tmp_path / "code")
    plain_loop(training)
    (path,) = (state / "jobs" / "step" / "checkpoints").glob("step-*.ckpt")
    for name, value in load(path)["model"].items():
        torch.testing.assert_close(value, training.model.state_dict()[name], rtol=1e-5, atol=1e-7)
    changes = [change for entry in entries if (planned := entry.record.planned) for change in planned.changes]
    assert all(change.allocation for change in changes), "jobs elsewhere are never released"
    on_lost = {each.job for each in changes if each.allocation and lost_devices & {*each.allocation.devices()}}
    again = {job.spec.id for job in jobs if steps_made(state, job.spec.id) != dict.fromkeys(range(1, 7), 1)}
    assert again <= on_lost, "only jobs of the killed raylet made steps again"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("redis-server") is None, reason="needs redis-server (Debian: redis-server)")
@pytest.mark.parametrize("driver_ends", [False, True])
def test_jobs_go_on_while_the_head_is_away_and_with_its_tables_the_fleet_grows_and_shrinks_again(
    tmp_path: Path, driver_ends: bool
) -> None:
    state, gate = tmp_path / "state", tmp_path / "gate"
    jobs = gated_jobs(tmp_path / "code", 4, gate)

    async def main(cluster: RestartableCluster) -> None:
        async with ray_daemon(state, cluster.address, lease_s=LEASE_S) as (daemon, engine):
            first = live_nodes(daemon)
            await daemon.loop.submit(jobs[:2])
            await until(daemon, lambda: {node_of(daemon, job.spec.id) for job in jobs[:2]} == {*first})
            await asyncio.to_thread(cluster.kill_head)
            assert engine.driver_pid is not None
            if driver_ends:  # as it does with the head's raylet, if that is the one it is connected to
                os.kill(engine.driver_pid, signal.SIGKILL)
            gate.touch()
            await until(daemon, lambda: not daemon.scheduler.jobs)
            gate.unlink()
            await asyncio.to_thread(cluster.start_head)
            await asyncio.to_thread(cluster.add)
            await until(daemon, lambda: len(live_nodes(daemon)) == 3)
            (joined,) = {*live_nodes(daemon)} - {*first}
            drained = next(node.id for node in daemon.scheduler.cluster.nodes if node.name == first[0])
            await daemon.loop.apply(NodeDrained(drained))
            await until(daemon, lambda: first[0] not in live_nodes(daemon))
            await daemon.loop.submit(jobs[2:])
            await until(daemon, lambda: {node_of(daemon, job.spec.id) for job in jobs[2:]} == {first[1], joined})
            gate.touch()
            await until(daemon, lambda: not daemon.scheduler.jobs)
            assert {*live_nodes(daemon)} == {first[1], joined}

    with restartable_cluster(2, with_redis=True) as cluster:
        asyncio.run(main(cluster))
    entries = read(state)
    check_journal(entries, [job.spec.id for job in jobs])
    assert all(steps_made(state, job.spec.id) == dict.fromkeys(range(1, 7), 1) for job in jobs), "none was interrupted"


@pytest.mark.slow
def test_jobs_resume_on_a_cluster_that_was_started_anew_after_its_head_was_lost(tmp_path: Path) -> None:
    state, gate, clock = tmp_path / "state", tmp_path / "gate", ShiftedClock()
    jobs = gated_jobs(tmp_path / "code", 2, gate)

    async def main(cluster: RestartableCluster) -> None:
        async with ray_daemon(state, cluster.address, lease_s=LEASE_S, clock=clock) as (daemon, engine):
            await daemon.loop.submit(jobs)
            await until(daemon, lambda: all(node_of(daemon, job.spec.id) for job in jobs))
            before = {engine.node_id(name) for name in live_nodes(daemon)}
            await asyncio.to_thread(cluster.kill_head)
            await asyncio.to_thread(cluster.kill_raylets)
            gate.touch()  # jobs stop at the end of their step, and only then their agents end
            await asyncio.to_thread(cluster.start_head)
            await become(lambda: not live_nodes(daemon) or not_yet(clock))
            for _ in before:
                await asyncio.to_thread(cluster.add)
            await until(daemon, lambda: not daemon.scheduler.jobs)
            assert not before & {engine.node_id(name) for name in live_nodes(daemon)}

    with restartable_cluster(2, with_redis=False) as cluster:
        asyncio.run(main(cluster))
    entries = read(state)
    check_journal(entries, [job.spec.id for job in jobs])
    found = outcomes(entries)
    assert {job.spec.id: found[job.spec.id].digest for job in jobs} == {
        job.spec.id: digest_alone(tmp_path / "code", job) for job in jobs
    }


@pytest.mark.slow
def test_an_idle_node_is_released_and_demand_brings_one_back(tmp_path: Path) -> None:
    state, gate = tmp_path / "state", tmp_path / "gate"
    jobs = gated_jobs(tmp_path / "code", 3, gate)

    async def main() -> None:
        async with ray_daemon(state, address, lease_s=LEASE_S, idle_s=0.5) as (daemon, engine):
            (first,) = live_nodes(daemon)
            node = engine.node_id(first)
            await until(daemon, lambda: not live_nodes(daemon))
            await become(lambda: engine.node_id(first) != node)  # Ray has removed the node
            await daemon.loop.submit(jobs)
            await until(daemon, lambda: len(live_nodes(daemon)) == 2)
            gate.touch()
            await until(daemon, lambda: not daemon.scheduler.jobs)
            await until(daemon, lambda: not live_nodes(daemon))
            await become(lambda: not any(engine.node_id(name) for name in (first, f"{first}-2")))

    with autoscaling_cluster(most=2) as address:
        asyncio.run(main())
    entries = read(state)
    check_journal(entries, [job.spec.id for job in jobs])
    found = outcomes(entries)
    assert {job.spec.id: found[job.spec.id].digest for job in jobs} == {
        job.spec.id: digest_alone(tmp_path / "code", job) for job in jobs
    }
