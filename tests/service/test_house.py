"""A daemon is killed again and again: its jobs end once, with the weights they would have had anyway."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from carpool.core.model import JobId
from carpool.runtime.entry import load_training
from carpool.testing.crashes import Victim, check_journal, kill_after, outcomes, read, steps_made
from carpool.testing.reference import plain_loop

ENTRY = """
import time
import torch
from torch import nn
from carpool import Stop, Training
from carpool.runtime.datasets.tensors import TensorData


def tiny(seed=0, steps=60, step_s=0.01):
    chance = torch.Generator().manual_seed(seed)
    data = TensorData(torch.randn(64, 6, generator=chance), torch.randint(0, 3, (64,), generator=chance))
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))
    return Training(
        model=model, optimizer=torch.optim.Adam(model.parameters(), lr=0.01), dataset=data,
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        batch_size=16, stop=Stop(steps=steps),
        after_update=lambda model, step: (time.sleep(step_s), print("step", step, flush=True)),
    )
"""


def write_jobs(folder: Path, count: int, **args: object) -> Path:
    (folder / "jobs.py").write_text(ENTRY, encoding="utf-8")
    lines = []
    for number in range(count):
        given = ", ".join(f"{key} = {value}" for key, value in {"seed": number, **args}.items())
        lines.append(f'[[job]]\nname = "job-{number}"\nentry = "jobs.py:tiny"\nargs = {{ {given} }}\n')
    path = folder / "jobs.toml"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.fixture
def victim(tmp_path: Path) -> Victim:
    return Victim(tmp_path / "state", write_jobs(tmp_path, 3), mark=f"house-{tmp_path}")


def test_killed_and_started_again_all_jobs_end_once_and_no_step_is_made_twice(victim: Victim, tmp_path: Path) -> None:
    chance = random.Random(5)
    for _ in range(2):
        assert kill_after(victim.start(), chance.randrange(4, 9))
    assert not kill_after(victim.start(), 10**9)
    assert victim.left_behind() == {}
    entries = read(victim.state)
    jobs = [JobId(f"job-{number}") for number in range(3)]
    check_journal(entries, jobs)
    assert max(entry.mark.epoch for entry in entries) == 3
    assert len({entry.mark.life for entry in entries if entry.mark.life}) == 1, "one executor outlived all daemons"
    found = outcomes(entries)
    for number, job in enumerate(jobs):
        training = load_training("jobs.py:tiny", {"seed": number, "step_s": 0.0}, folder=tmp_path)
        assert found[job].digest == plain_loop(training).digest
        assert steps_made(victim.state, job) == dict.fromkeys(range(1, 61), 1)
