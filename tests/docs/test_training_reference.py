"""The reference of `Training`: its examples train, and it names every parameter and no other."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from carpool import Report, Stop, Training
from carpool.runtime.engine.determinism import seed_entry
from carpool.runtime.engine.trainer import Trainer
from carpool.testing import plain_loop

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "reference" / "training.md").read_text(encoding="utf-8")
CODE = "\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
ENTRIES = re.findall(r"^def (\w+)\(.*\) -> Training:", CODE, re.MULTILINE)


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    found: dict[str, Any] = {"__name__": "page"}
    exec(compile(CODE, "training.md", "exec"), found)
    return found


@pytest.mark.parametrize("entry", ENTRIES)
def test_an_example_trains_as_a_plain_loop_does(names: dict[str, Any], entry: str) -> None:
    seed_entry(0)
    trainer = Trainer(names[entry]())
    losses = [done.loss for done in trainer.steps()]
    seed_entry(0)
    assert losses == plain_loop(names[entry]()).losses


def rows(section: str) -> set[str]:
    part = PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return {name for row in re.findall(r"^\| (`.*?) \|", part, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}


def test_every_parameter_is_explained() -> None:
    parameters = {each.name for each in fields(Training)} - {"_"}
    assert rows("Parameters") == parameters
    assert rows("Stop") == {each.name for each in fields(Stop)}
    for kind, named in ((Training, parameters), (Stop, rows("Stop"))):
        assert all(f"        {name}: " in (kind.__doc__ or "") for name in named)
    assert all(f"`{each.name}`" in PAGE for each in fields(Report))


def test_the_logging_recipes_are_functions_of_a_report(names: dict[str, Any]) -> None:
    assert callable(names["log_to_wandb"]("project", "id"))
    assert callable(names["log_to_mlflow"]("id"))
