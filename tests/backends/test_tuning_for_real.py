"""Batch sizes tuned while real trainings run: they reach what they are trained for."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from carpool.backends.run_folder import RunFolder
from carpool.core.model import JobId, Phase
from carpool.jobs.devices import parse_devices
from carpool.jobs.job_file import parse_jobs
from carpool.runtime.executor.client import ExecutorClient
from carpool.service.daemon.batch_run import BatchRun, RunEnd, RunRequest
from tests.support.shared_executor import SharedExecutor

pytest.importorskip("torch")
pytest.importorskip("sklearn")

ENTRY = """
import torch
from torch import nn
import carpool


def digits():
    data = carpool.datasets.digits()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    images, labels = data.test.tensors

    def evaluate(model):
        return {"accuracy": float((model(images).argmax(1) == labels).float().mean())}

    return carpool.Training(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.02),
        dataset=data.train,
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        batch_size=32,
        stop=carpool.Stop(epochs=1000, target_metric="accuracy >= 0.9"),
        evaluate=evaluate,
    )
"""
TRIES_AT_ONCE = "iadeep:settle_s=0.05:predictor=false"  # nobody waits: all share from the beginning
TRIES_WHEN_SURE = "carpool:interval_s=0.2"  # quick trainings may be over by then; test_batch_tuning.py has its rule
TRIES_WITH_SHARES = "competitive:settle_s=0.05"  # after whole and moderate shares: the same holds


DEVICES = tuple(parse_devices("cpu:1x1"))


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def lender(runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedExecutor]:
    async def start() -> SharedExecutor:
        return SharedExecutor(await ExecutorClient.start(DEVICES, tmp_path_factory.mktemp("tuned") / "state"))

    lender = runner.run(start())
    yield lender
    runner.run(lender.close())


@pytest.mark.parametrize("policy", [TRIES_AT_ONCE, TRIES_WHEN_SURE, TRIES_WITH_SHARES])
def test_tuned_jobs_reach_their_target(
    policy: str, runner: asyncio.Runner, lender: SharedExecutor, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(ENTRY, encoding="utf-8")
    batch = {"size": 32, "tune": True, "min": 8, "max": 128}
    unnamed = {"tune": True, "min": 8, "max": 128}  # the training says its own
    rows = [
        {"name": name, "entry": "train.py:digits", "batch": given, "seed": seed}
        for seed, (name, given) in enumerate({"a": batch, "b": unnamed}.items())
    ]
    rows.append({"name": "own", "entry": "train.py:digits"})
    run_name = policy.partition(":")[0]
    rows = [{**row, "name": f"{run_name}-{row['name']}"} for row in rows]  # the executor knows one job of a name
    jobs = parse_jobs({"job": rows}, tmp_path, "test")
    request = RunRequest("test", jobs, DEVICES, policy, "0")
    run = BatchRun.open(request, RunFolder(tmp_path / "run"), lender.lend)
    assert runner.run(asyncio.wait_for(run.run(), 100.0)) is RunEnd.DONE
    run.close()
    sizes: dict[str, set[int]] = {}
    for name, account in run.accounting.accounts.items():
        assert account.phase is Phase.FINISHED, account.error
        assert account.outcome is not None
        assert account.outcome.metrics["accuracy"] >= 0.9
        given = [decision.allocation for decision in account.decisions]
        sizes[name.removeprefix(f"{run_name}-")] = {each.batch_size for each in given if each is not None}
    tried = (sizes["a"] | sizes["b"]) - {0, 32}
    assert tried or policy != TRIES_AT_ONCE, sizes
    assert all(8 <= size <= 128 for size in tried)
    assert sizes["own"] == {0}, "only where the job allows it"
    seen = [name for name in sizes if run.estimator.noise(JobId(f"{run_name}-{name}")) is not None]
    assert set(seen) <= {"a", "b"}, "gradients of others are not compared"
    assert seen or policy != TRIES_AT_ONCE, "a training that is over at once has told nothing"
