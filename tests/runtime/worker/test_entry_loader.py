"""Entries: loading, seeding, and the errors of wrong ones."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from carpool.core.errors import InputError, UnknownName
from carpool.runtime.engine.training import Training
from carpool.runtime.state.digest import digest
from carpool.runtime.worker.entry_loader import find_entry, load_training

FILE = """
import random
import torch, carpool
from neighbour import RATE

WIDTH = random.randint(1, 10**9) + int(torch.randint(9, ()))  # the import draws random numbers

def mlp(lr: float = RATE, *, width=4):
    data = carpool.datasets.synthetic((6,), classes=3, size=20)
    model = torch.nn.Sequential(torch.nn.Linear(6, width), torch.nn.ReLU(), torch.nn.Linear(width, 3))
    return carpool.Training(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=lr),
        dataset=data.train,
        loss=lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1]),
        batch_size=8,
        stop=carpool.Stop(epochs=1),
    )

def needs(lr): return mlp(lr)
def forgets(): mlp()
def breaks():
    return torch.nn.Linear(2, 2)(torch.zeros(3))
def anything(**kwargs): return mlp(**kwargs)
def too_large():
    return carpool.Training(torch.nn.Linear(1, 1), None, [1], len, 1, carpool.Stop(steps=1))
number = 7
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "digits.py").write_text(FILE)
    (tmp_path / "neighbour.py").write_text("RATE = 0.5")
    (tmp_path / "broken.py").write_text("x = 1\nimport no_such_thing\n")
    (tmp_path / "typo.py").write_text("x = 1\ndef f(:\n")
    return tmp_path


def test_an_entry_is_called_with_its_arguments(folder: Path) -> None:
    training = load_training("digits.py:mlp", {"lr": 0.25, "width": 5}, folder=folder)
    assert isinstance(training, Training)
    assert training.whole_optimizer.param_groups[0]["lr"] == 0.25
    assert load_training("digits.py:mlp", folder=folder).whole_optimizer.param_groups[0]["lr"] == 0.5
    assert load_training("digits.py:anything", {"width": 3}, folder=folder).batch_size == 8
    assert load_training(f"{folder}/digits.py:mlp").batch_size == 8


def test_the_initial_weights_depend_on_the_seed_only(folder: Path) -> None:
    digests = [digest(load_training("digits.py:mlp", seed=seed, folder=folder).model) for seed in (0, 0, 1)]
    assert digests[0] == digests[1] != digests[2]


def test_generators_are_seeded_before_the_import(folder: Path) -> None:
    widths = []
    for _ in range(2):
        load_training("digits.py:mlp", folder=folder)
        module = sys.modules.pop(find_entry("digits.py:mlp", folder).__module__)
        widths.append(module.WIDTH)
    assert widths[0] == widths[1]


def test_an_importable_module_works_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(folder))
    assert load_training("digits:mlp").batch_size == 8


@pytest.mark.parametrize(
    ("entry", "args", "error", "message"),
    [
        ("digits.py", {}, InputError, r"entry 'digits\.py'.*file\.py:function"),
        (":mlp", {}, InputError, "entry ':mlp'"),
        ("digit.py:mlp", {}, UnknownName, r"unknown file 'digit\.py'\. Did you mean digits\.py"),
        ("digits.py:mpl", {}, UnknownName, r"digits\.py: unknown function 'mpl'\. Did you mean mlp\?"),
        ("digits.py:number", {}, InputError, r"digits\.py: number is a int, not a function"),
        ("digits.py:mlp", {"wdth": 1}, UnknownName, r"digits\.py:mlp: unknown argument 'wdth'\. Did you mean width\?"),
        ("digits.py:needs", {}, InputError, r"digits\.py:needs: argument 'lr' is missing"),
        ("digits.py:forgets", {}, InputError, r"digits\.py:forgets: returned None.*carpool\.Training"),
        ("digits.py:breaks", {}, InputError, r"digits\.py:breaks: raised RuntimeError: .* \(digits\.py, line 23\)"),
        ("digits.py:too_large", {}, InputError, r"digits\.py:too_large: Training\(optimizer=…\) is missing"),
        ("broken.py:f", {}, InputError, r"broken\.py:f: importing .* ModuleNotFoundError: .* \(broken\.py, line 2\)"),
        ("typo.py:f", {}, InputError, r"typo\.py:f: importing typo\.py raised SyntaxError: invalid syntax \(line 2\)"),
        ("no_such_module:f", {}, InputError, "importing no_such_module raised ModuleNotFoundError"),
    ],
)  # fmt: skip
def test_wrong_entries_are_rejected(
    folder: Path, entry: str, args: dict[str, object], error: type[InputError], message: str
) -> None:
    with pytest.raises(error, match=message):
        load_training(entry, args, folder=folder)
