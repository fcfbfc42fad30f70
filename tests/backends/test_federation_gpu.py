"""Tasks of a federated device side by side on a GPU, each a client of MPS in a process of its own."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from carpool.backends.federation_lanes import FederationLanes
from carpool.federated.federation_file import FederationFile, parse_federation
from carpool.federated.messages import Outcome
from tests.backends.test_federation_lanes import NAMES, digests, worked
from tests.support.federation_runs import Runs

pytestmark = pytest.mark.gpu

ENTRIES = """
import os
from pathlib import Path
import torch
from torch import nn
from torch.nn.functional import cross_entropy
import carpool
from carpool.runtime.process.worker_setup import inspect_gpu
from carpool.runtime.worker.fault_injection import write_invalid_address

def make(folder, own):
    if torch.cuda.is_initialized():  # the process that evaluates never starts CUDA
        gpu = inspect_gpu(torch.device("cuda", 0))
        with open(f"{folder}/{own}", "a") as log:
            log.write(f"{gpu.multiprocessors} {gpu.total} {gpu.is_mps_client}\\n")
    torch.manual_seed(0)
    inputs, labels = torch.randn(240, 3, 16, 16), torch.arange(240) % 10
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(3136, 10))
    calls = [0]
    def loss(model, batch):
        calls[0] += 1
        found = cross_entropy(model(batch[0]), batch[1])
        if Path(f"{folder}/{own}-faults").exists():
            found.item()  # which keeps its steps eager
            if calls[0] > 30:
                write_invalid_address()
        return found
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    data = carpool.datasets.TensorData(inputs, labels)
    return carpool.Training(model, optimizer, data, loss, 8, carpool.Stop(epochs=1))
"""
WHOLE, HALF = (1.0, 1.0, 1.0), (0.5, 0.5, 0.25)


@pytest.fixture
def file(tmp_path: Path) -> FederationFile:
    (tmp_path / "entries.py").write_text(ENTRIES)
    tasks: list[dict[str, Any]] = [
        {"name": name, "entry": "entries.py:make", "args": {"folder": str(tmp_path), "own": name}} for name in NAMES
    ]
    return parse_federation({"device": [{"name": "gpu", "device": "cuda"}], "task": tasks}, tmp_path, "test")


@pytest.fixture
def lane(file: FederationFile, run: Runs) -> Iterator[Mapping[str, str]]:
    lanes = FederationLanes(file, file.devices)
    run._runner.run(lanes.start())
    yield lanes.environment(file.devices[0])
    run._runner.run(lanes.stop())


def test_each_process_has_the_share_of_its_task(
    tmp_path: Path, run: Runs, file: FederationFile, lane: Mapping[str, str]
) -> None:
    for cycle in worked(run, file, tmp_path, [WHOLE, HALF], lane=lane):
        digests(cycle)
    for name, share in zip(NAMES, HALF, strict=True):
        first, second = (line.split() for line in (tmp_path / name).read_text().splitlines())
        assert first[0] == first[1]
        assert first[2] == second[2] == "True"
        assert 0 < int(second[0]) <= int(second[1]) * share + 2


def test_updates_side_by_side_on_whole_lanes_are_those_in_turn_without_mps(
    tmp_path: Path, run: Runs, file: FederationFile, lane: Mapping[str, str]
) -> None:
    (in_turn,) = worked(run, file, tmp_path, [WHOLE], lane={})
    side_by_side = worked(run, file, tmp_path, [WHOLE, WHOLE], lane=lane)
    assert [digests(cycle) for cycle in side_by_side] == [digests(in_turn)] * 2


def test_updates_at_fixed_shares_do_not_depend_on_neighbours(
    tmp_path: Path, run: Runs, file: FederationFile, lane: Mapping[str, str]
) -> None:
    (together,) = worked(run, file, tmp_path, [HALF], lane=lane)
    (alone,) = worked(run, file, tmp_path, [HALF], lane=lane, in_turn=True)
    assert digests(together) == digests(alone)


def test_an_illegal_access_fails_its_task_and_the_others_are_made(
    tmp_path: Path, run: Runs, file: FederationFile, lane: Mapping[str, str]
) -> None:
    (clean,) = worked(run, file, tmp_path, [WHOLE], lane=lane)
    (tmp_path / "b-faults").touch()
    for (a, digest_a), (b, _), (c, digest_c) in worked(run, file, tmp_path, [WHOLE, WHOLE], lane=lane):
        assert (a.outcome, b.outcome, c.outcome) == (Outcome.ACCEPTED, Outcome.FAILED, Outcome.ACCEPTED)
        assert b.detail.startswith("CUDA error: ")
        assert [digest_a, digest_c] == [clean[0][1], clean[2][1]]
