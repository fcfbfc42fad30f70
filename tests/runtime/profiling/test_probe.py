"""Probed trainings train the same, and write their measurements to a file."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from carpool.runtime.data.datasets import TensorData
from carpool.runtime.engine.trainer import Trainer
from carpool.runtime.engine.training import Training
from carpool.runtime.memory.memory_usage import MemoryFootprint, limit_memory
from carpool.runtime.profiling import probe
from carpool.runtime.state.digest import digest

MakeTraining = Callable[..., Training]


@pytest.fixture
def entry(make_training: MakeTraining, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every entry loads the training of 100 samples."""
    monkeypatch.setattr(probe, "load_training", lambda entry, args, seed: make_training(**args))


def config(folder: Path, **more: Any) -> dict[str, Any]:
    return {"out": str(folder), "warmup": 2, "steps": 3, **more}


def only_file(folder: Path) -> dict[str, Any]:
    (path,) = folder.glob("*.json")
    measured: dict[str, Any] = json.loads(path.read_text())
    return measured


@pytest.mark.usefixtures("entry")
def test_a_probed_training_makes_the_same_steps(tmp_path: Path, make_training: MakeTraining) -> None:
    probed = Trainer(probe.probed_training("net.py:net", {}, 0, config(tmp_path)))
    plain = Trainer(make_training())
    assert len(list(probed.steps())) == 5
    for _ in range(5):
        plain.step()
    assert digest(probed.training.model) == digest(plain.training.model)


@pytest.mark.usefixtures("entry")
def test_measurements_are_written_to_a_file(tmp_path: Path) -> None:
    calls: list[int] = []
    args = {"after_update": lambda model, step: calls.append(step), "evaluate": lambda model: 1.0, "best": "max metric"}
    for _ in Trainer(probe.probed_training("net.py:net", args, 0, config(tmp_path))).steps():
        pass
    measured = only_file(tmp_path)
    assert measured["steps"] == 3
    assert measured["step_s"] > 0.0
    assert measured["start_s"] > 0.0
    assert measured["batch_bytes"] == 36 * 6 * 4 + 36 * 8
    assert measured["bandwidth_use"] is None  # unknown on a CPU
    assert measured["host_to_device_bytes"] is None
    assert 0.0 < measured["device_use"] <= 1.0
    assert measured["training"] == {"batch_size": 36, "num_samples": 100, "stop_steps": None, "stop_epochs": 2}
    assert calls == [1, 2, 3, 4, 5]  # the training's own hook is called too


@pytest.mark.usefixtures("entry")
def test_gradient_noise_is_measured_from_the_parts_of_a_batch(tmp_path: Path) -> None:
    inputs = torch.randn(100, 6)
    data = TensorData(inputs, inputs[:, :3].argmax(dim=1))  # learnable labels
    args = {"batch_norm": False, "dataset": data}
    training = probe.measure_noise("net.py:net", args, 0, config(tmp_path, warmup=0, steps=6))
    measured = only_file(tmp_path)
    assert (measured["parts"], measured["steps"]) == (8, 6)
    assert measured["scale"] > 0.0
    assert len(list(Trainer(training).steps())) == 1  # the worker then makes one step


@pytest.mark.usefixtures("entry")
def test_a_batch_that_cannot_be_split_has_no_noise(tmp_path: Path) -> None:
    probe.measure_noise("net.py:net", {"batch_size": 3, "num_samples": 99}, 0, config(tmp_path))
    assert only_file(tmp_path)["parts"] == 1


def test_part_norms_are_those_of_the_parts_own_gradients(make_training: MakeTraining) -> None:
    training = make_training(batch_norm=False, model=torch.nn.Linear(6, 3))
    data, model = training.dataset, training.model
    trainer = Trainer(training, exact=True, shards=4)
    step = trainer.next_step()
    expected = []
    for start, end in step.bounds:
        model.zero_grad()
        assert training.loss is not None
        training.loss(model, data.batch(torch.from_numpy(step.draw.samples[start:end]))).backward()
        expected.append(sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None))
    sizes, norms, total = probe._part_norms(trainer)
    assert sizes == [9, 9, 9, 9]
    assert norms == pytest.approx(expected, rel=1e-4)
    assert total < max(norms)


def test_a_footprint_includes_freed_memory() -> None:
    cpu = torch.device("cpu")
    footprint = MemoryFootprint(cpu)
    footprint.reset_peak()
    torch.ones(64 << 20, dtype=torch.uint8)  # freed at once
    assert 60 << 20 < footprint.peak_bytes() < 90 << 20
    footprint.reset_peak()
    assert footprint.peak_bytes() < 32 << 20


def test_memory_limits() -> None:
    """In a child process, because a lowered limit cannot be raised again."""
    import os

    pid = os.fork()
    if not pid:
        limit_memory(256 << 20, torch.device("cpu"))
        try:
            bytearray(1 << 30)
        except MemoryError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
