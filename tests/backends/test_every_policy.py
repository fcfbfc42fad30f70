"""Every policy runs real jobs: tiny trainings in real processes, under one executor that all of them borrow."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from carpool.backends.run_folder import RunFolder
from carpool.core.model import Phase
from carpool.jobs.devices import parse_devices
from carpool.jobs.job_file import parse_jobs
from carpool.policies.registry import POLICIES
from carpool.runtime.executor.client import ExecutorClient
from carpool.service.daemon.batch_run import BatchRun, RunEnd, RunRequest
from tests.support.shared_executor import SharedExecutor

pytest.importorskip("torch")

DEVICES = parse_devices("cpu:2x1", oversubscribe=True)
LIVE = {  # what a policy needs to be told for trainings that take a fraction of a second
    "competitive": "competitive:settle_s=0.05",
    "iadeep": "iadeep:settle_s=0.05",
    "gavel": "gavel:turn_s=0.2",
}
ENTRY = """
import torch
from torch import nn
from carpool import Stop, Training
from carpool.runtime.data.datasets import synthetic


def net(steps=8):
    data = synthetic((8,), classes=4, size=64)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    return Training(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        dataset=data.train,
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        batch_size=16,
        stop=Stop(steps=steps),
    )
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("live")
    (folder / "train.py").write_text(ENTRY, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def lender(loop: asyncio.Runner, home: Path) -> Iterator[SharedExecutor]:
    async def start() -> SharedExecutor:
        return SharedExecutor(await ExecutorClient.start(DEVICES, home / "state"))

    lender = loop.run(start())
    yield lender
    loop.run(lender.close())


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_real_jobs_run_to_their_end(policy: str, loop: asyncio.Runner, lender: SharedExecutor, home: Path) -> None:
    text = LIVE.get(policy, policy)
    widest = 1 if policy == "allox" else 2
    rows: list[dict[str, object]] = [
        {"name": f"{policy}-a", "weight": 2.0},
        {"name": f"{policy}-b", "max_devices": widest},
        {"name": f"{policy}-c", "batch": {"size": 16, "tune": True, "min": 8, "max": 32}},
    ]
    jobs = parse_jobs({"defaults": {}, "job": [{"entry": "train.py:net", **row} for row in rows]}, home, "test")
    request = RunRequest("test", jobs, tuple(DEVICES), text, "0")
    run = BatchRun.open(request, RunFolder(home / "runs" / policy), lender.lend)
    assert loop.run(asyncio.wait_for(run.run(), 60.0)) is RunEnd.DONE
    run.close()
    accounts = run.accounting.accounts
    assert {account.phase for account in accounts.values()} == {Phase.FINISHED}, accounts
