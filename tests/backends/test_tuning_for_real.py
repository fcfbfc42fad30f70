"""Batch sizes tuned while real trainings run: they reach what they are trained for."""

import asyncio
from pathlib import Path

import pytest

from carpool.backends.run_folder import RunFolder
from carpool.core.model import JobId, Phase
from carpool.jobs.devices import parse_devices
from carpool.jobs.job_file import parse_jobs
from carpool.runtime.executor.client import ExecutorClient
from carpool.service.daemon.batch_run import BatchRun, RunEnd, RunRequest

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


@pytest.mark.parametrize("policy", [TRIES_AT_ONCE, TRIES_WHEN_SURE, TRIES_WITH_SHARES])
def test_tuned_jobs_reach_their_target(policy: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ENTRY, encoding="utf-8")
    batch = {"size": 32, "tune": True, "min": 8, "max": 128}
    unnamed = {"tune": True, "min": 8, "max": 128}  # the training says its own
    rows = [
        {"name": name, "entry": "train.py:digits", "batch": given, "seed": seed}
        for seed, (name, given) in enumerate({"a": batch, "b": unnamed}.items())
    ]
    devices = tuple(parse_devices("cpu:1x1"))
    jobs = parse_jobs({"job": [*rows, {"name": "own", "entry": "train.py:digits"}]}, tmp_path, "test")
    request = RunRequest("test", jobs, devices, policy, "0")
    run = BatchRun.open(request, RunFolder(tmp_path / "run"), ExecutorClient.start)
    assert asyncio.run(asyncio.wait_for(run.run(), 100.0)) is RunEnd.DONE
    run.close()
    sizes: dict[str, set[int]] = {}
    for name, account in run.accounting.accounts.items():
        assert account.phase is Phase.FINISHED, account.error
        assert account.outcome is not None
        assert account.outcome.metrics["accuracy"] >= 0.9
        sizes[name] = {given.allocation.batch_size for given in account.decisions if given.allocation is not None}
    tried = (sizes["a"] | sizes["b"]) - {0, 32}
    assert tried or policy != TRIES_AT_ONCE, sizes
    assert all(8 <= size <= 128 for size in tried)
    assert sizes["own"] == {0}, "only where the job allows it"
    seen = [name for name in sizes if run.estimator.noise(JobId(name)) is not None]
    assert set(seen) <= {"a", "b"}, "gradients of others are not compared"
    assert seen or policy != TRIES_AT_ONCE, "a training that is over at once has told nothing"
