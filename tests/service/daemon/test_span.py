"""One job on devices of several machines: the weights of one device, through resizes and losses."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch

from carpool.core.messages import LinkMeasured
from carpool.core.model import JobId
from carpool.jobs.job_file import ListedJob, read_jobs
from carpool.runtime.state.checkpoint import load
from carpool.runtime.worker.entry_loader import load_training
from carpool.service.daemon.bootstrap import DaemonInstance
from carpool.testing.reference import plain_loop
from tests.support import staircase
from tests.support.daemon_crash import SLOW_TRAINING, outcomes, read
from tests.support.fleet_rig import PATIENCE_S, AgentProcess, fleet_daemon, hosts_of, until

LEASE_S = 3.0
SPAN = "min_devices = 1\nmax_devices = 2\nmax_nodes = 2\n"
STAIRCASE = f"{Path(staircase.__file__)}:Staircase"


def job_in(folder: Path, steps: int = 40, step_s: float = 0.01, extra: str = "") -> ListedJob:
    folder.mkdir(exist_ok=True)
    (folder / "jobs.py").write_text(SLOW_TRAINING, encoding="utf-8")
    (folder / "jobs.toml").write_text(
        '[[job]]\nname = "wide"\nentry = "jobs.py:tiny"\nexact = true\n'
        f"args = {{ seed = 3, steps = {steps}, step_s = {step_s} }}\n{extra}",
        encoding="utf-8",
    )
    (job,) = read_jobs(folder / "jobs.toml").jobs
    return job


def digest_of(folder: Path, job: ListedJob) -> str:
    args = {**job.program.args, "step_s": 0.0}
    return plain_loop(load_training("jobs.py:tiny", args, folder=folder), shards=job.program.shards).digest


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[list[AgentProcess]]:
    started = [AgentProcess(tmp_path, name) for name in ("left", "right")]
    for each in started:
        each.start()
    yield started
    for each in started:
        each.close()


def nodes_of(daemon: DaemonInstance, job: str = "wide") -> list[str]:
    """The machines that a job is assigned devices of."""
    held = daemon.scheduler.jobs[JobId(job)].desired if JobId(job) in daemon.scheduler.jobs else None
    return [] if held is None else sorted({daemon.scheduler.cluster.node_of(d).name for d in held.devices()})


def done(daemon: DaemonInstance) -> float:
    return daemon.observers.accounting.accounts[JobId("wide")].done


def has_reached(daemon: DaemonInstance, width: int, steps: int) -> bool:
    return len(nodes_of(daemon)) == width and done(daemon) >= steps


def workers_of(agent: AgentProcess) -> set[int]:
    """The worker processes of an agent's executor: children of its fork server."""
    executor, found = agent.executor_pid, set()
    for path in Path("/proc").glob("[0-9]*/status"):
        with suppress(OSError):
            fields = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
            parent = int(fields["PPid"])
            with suppress(OSError, StopIteration):
                above = Path(f"/proc/{parent}/status").read_text()
                if f"PPid:\t{executor}\n" in above:
                    found.add(int(path.parent.name))
    return found


def digest_in(state: Path) -> str | None:
    return outcomes(read(state))[JobId("wide")].digest


def test_an_exact_job_over_two_machines_has_the_weights_of_one_device(
    tmp_path: Path, agents: list[AgentProcess]
) -> None:
    job = job_in(tmp_path / "code", extra="devices = 2\nmax_nodes = 2\n")
    state, seen = tmp_path / "state", []

    async def main() -> None:
        async with fleet_daemon(state, hosts_of(*agents)) as daemon:
            await daemon.loop.submit([job])
            await until(daemon, lambda: bool(nodes_of(daemon)))
            seen.extend(nodes_of(daemon))
            await until(daemon, lambda: not daemon.scheduler.jobs)

    asyncio.run(main())
    assert seen == ["left", "right"]
    assert digest_in(state) == digest_of(tmp_path / "code", job)


def test_the_link_between_two_machines_is_measured_when_they_join(tmp_path: Path, agents: list[AgentProcess]) -> None:
    async def main() -> None:
        async with fleet_daemon(tmp_path / "state", hosts_of(*agents)) as daemon:
            async with asyncio.timeout(PATIENCE_S):
                while not daemon.scheduler.cluster.links:  # noqa: ASYNC110 - a survey has no event
                    await asyncio.sleep(0.01)
            (link,) = daemon.scheduler.cluster.links
            assert link.ends == ("left", "right")
            assert link.bytes_per_s > 0.0
            await daemon.loop.flush()

    asyncio.run(main())
    measured = [fact for entry in read(tmp_path / "state") for fact in entry.record.facts]
    assert [type(fact) for fact in measured if isinstance(fact, LinkMeasured)] == [LinkMeasured], "durable, once"


def test_an_exact_job_widens_over_a_second_machine_and_narrows_again(
    tmp_path: Path, agents: list[AgentProcess]
) -> None:
    job = job_in(tmp_path / "code", 200, 0.02, SPAN)
    state = tmp_path / "state"
    seen: list[int] = []

    async def main() -> None:
        async with fleet_daemon(state, hosts_of(*agents), f"{STAIRCASE}:first=20:last=80") as daemon:
            await daemon.loop.submit([job])
            for width, steps in ((1, 1), (2, 40), (1, 120)):
                await until(daemon, partial(has_reached, daemon, width, steps))
                seen.append(len(nodes_of(daemon)))
            await until(daemon, lambda: not daemon.scheduler.jobs)

    asyncio.run(main())
    assert seen == [1, 2, 1]
    assert digest_in(state) == digest_of(tmp_path / "code", job)
    log = (state / "jobs" / "wide" / "log").read_bytes()
    assert log.count(b"step 50\n") == 2, "the log has the output of both machines"


@pytest.mark.parametrize("lost", ["peer", "lead"])
@pytest.mark.waits
def test_a_machine_is_lost_and_the_job_goes_on_with_the_rest(
    lost: str, tmp_path: Path, agents: list[AgentProcess]
) -> None:
    job = job_in(tmp_path / "code", 200, 0.02, f"{SPAN}checkpoint_every = 1\n")
    state = tmp_path / "state"

    async def main() -> None:
        async with fleet_daemon(state, hosts_of(*agents, lease_s=LEASE_S), STAIRCASE) as daemon:
            await daemon.loop.submit([job])
            await until(daemon, lambda: len(nodes_of(daemon)) == 2 and done(daemon) >= 10)
            lead = next(each for each in agents if each.log_of("wide"))
            other = next(each for each in agents if each is not lead)
            gone, left = (lead, other) if lost == "lead" else (other, lead)
            remote = workers_of(other)
            gone.kill()
            # Without a peer it goes on at once, and may end before the lease of the lost machine does.
            await until(daemon, lambda: nodes_of(daemon) in ([left.name], []))
            await until(daemon, lambda: not daemon.scheduler.jobs)
            assert not remote & workers_of(other), "a remote worker exits with its lead"

    asyncio.run(main())
    assert digest_in(state) == digest_of(tmp_path / "code", job)


PLAIN = """
import torch
from torch import nn
from carpool.runtime.data.datasets import TensorData
from carpool.runtime.engine.stop_criteria import Stop
from carpool.runtime.engine.training import Training

def plain():
    chance = torch.Generator().manual_seed(1)
    data = TensorData(torch.randn(64, 6, generator=chance), torch.randint(0, 3, (64,), generator=chance))
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    return Training(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        dataset=data,
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        batch_size=31,
        stop=Stop(steps=1),
    )
"""


def test_in_default_mode_a_step_over_two_machines_has_the_gradient_of_one_device(
    tmp_path: Path, agents: list[AgentProcess]
) -> None:
    folder, state = tmp_path / "code", tmp_path / "state"
    folder.mkdir()
    (folder / "plain.py").write_text(PLAIN, encoding="utf-8")
    table = '[[job]]\nname = "wide"\nentry = "plain.py:plain"\ndevices = 2\nmax_nodes = 2\n'
    (folder / "jobs.toml").write_text(table, encoding="utf-8")
    jobs = read_jobs(folder / "jobs.toml").jobs

    async def main() -> None:
        async with fleet_daemon(state, hosts_of(*agents)) as daemon:
            await daemon.loop.submit(jobs)
            await until(daemon, lambda: not daemon.scheduler.jobs)

    asyncio.run(main())
    training = load_training("plain.py:plain", {}, folder=folder)
    plain_loop(training)
    alone = training.model.state_dict()
    (path,) = (state / "jobs" / "wide" / "checkpoints").glob("step-*.ckpt")
    for name, value in load(path)["model"].items():
        torch.testing.assert_close(value, alone[name], rtol=1e-5, atol=1e-7)
