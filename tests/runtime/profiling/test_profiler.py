"""The profiler with its executor and real processes, on tiny trainings."""

import asyncio
from pathlib import Path

import pytest

from carpool.core.errors import InputError
from carpool.jobs.devices import parse_devices
from carpool.jobs.program import Program
from carpool.predictors.profiles.profile import Measurement, Profile
from carpool.runtime.profiling.profiler import MeasurementBudget, Profiler, ProfileRequest, make_profile
from carpool.runtime.profiling.sweep import SweepPoint

pytest.importorskip("torch")

ENTRY = """
import time
import torch
from torch import nn
from carpool import Stop, Training
from carpool.runtime.data.datasets import synthetic


def net(width=16, fail=False, sleep_s=0.0):
    data = synthetic((8,), classes=4, size=64)
    model = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 4))
    def loss(model, batch):
        if fail:
            raise RuntimeError("no luck")
        time.sleep(sleep_s)
        held = torch.ones(len(batch[0]) << 20, dtype=torch.uint8)  # one MiB per sample
        return nn.functional.cross_entropy(model(batch[0]), batch[1]) + 0 * held[0]
    return Training(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        dataset=data.train,
        loss=loss,
        batch_size=16,
        stop=Stop(epochs=3),
    )
"""
QUICK = MeasurementBudget(seconds=0.02, timeout_s=60.0)
(DEVICE,) = parse_devices("cpu:1x1")


@pytest.fixture
def program(tmp_path: Path) -> Program:
    (tmp_path / "train.py").write_text(ENTRY)
    return Program("train.py:net", folder=str(tmp_path))


def test_a_profile_of_a_real_training(program: Program) -> None:
    progress: list[str] = []

    def tell(done: int, total: int, text: str) -> None:
        progress.append(text)

    beside = Program(program.entry, {"width": 8}, folder=program.folder)
    request = ProfileRequest(batches=(8, 48), shares=(0.5, 1.0), beside=beside)
    profile = asyncio.run(make_profile(program, [DEVICE], request, QUICK, "1", tell))
    assert [(m.batch_size, m.share, m.exact, m.beside) for m in profile.measurements] == [
        (8, 1.0, False, ""),
        (16, 1.0, False, ""),
        (48, 1.0, False, ""),
        (16, 0.5, False, ""),
        (16, 0.5, False, "train.py:net"),
        (16, 1.0, False, "train.py:net"),
        (16, 1.0, True, ""),
    ]
    assert all(not m.error and m.step_s for m in profile.measurements)
    assert (profile.batch_size, profile.num_samples, profile.total_steps()) == (16, 64, 12)
    assert profile.noise is not None
    assert profile.noise.parts == 8
    assert len(progress) == 9
    _check_memory(profile)


def _check_memory(profile: Profile) -> None:
    """One MiB per sample, as in the entry."""
    memory = profile.memory(profile.kinds[0])
    assert memory is not None
    assert memory.predict(32).mean - memory.predict(16).mean == pytest.approx(16 << 20, rel=0.1)


def test_out_of_memory_and_timeouts_are_recorded(program: Program) -> None:
    async def measure() -> list[Measurement]:
        budget = MeasurementBudget(seconds=0.02, timeout_s=60.0, memory_bytes=40 << 20)
        async with Profiler.start(program, [DEVICE], budget) as profiler:
            return [await profiler.measure(SweepPoint((DEVICE,), batch)) for batch in (8, 64, 8)]

    small, large, again = asyncio.run(measure())
    assert (small.error, again.error) == ("", "")
    assert large.out_of_memory
    assert "memory" in large.error

    async def wait() -> Measurement:
        slow = Program(program.entry, {"sleep_s": 60.0}, folder=program.folder)
        async with Profiler.start(slow, [DEVICE], MeasurementBudget(timeout_s=1.0)) as profiler:
            return await profiler.measure(SweepPoint((DEVICE,), 8))

    assert "1 s" in asyncio.run(wait()).error


def test_an_error_of_the_entry_is_reported(program: Program) -> None:
    bad = Program(program.entry, {"fail": True}, folder=program.folder)
    with pytest.raises(InputError, match="no luck"):
        asyncio.run(make_profile(bad, [DEVICE], ProfileRequest(), QUICK, "1"))
