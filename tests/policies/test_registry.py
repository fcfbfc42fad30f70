"""Policies from files of one's own: what is no policy is told before anything is started."""

from pathlib import Path

import pytest

from carpool.cli.main import run
from carpool.core.errors import InputError
from carpool.policies.registry import parse_policy

MINE = """
from dataclasses import dataclass
from carpool.core.policy import Plan, Policy


class Plain(Policy):
    def plan(self, view):
        return Plan.NOTHING


@dataclass(frozen=True, slots=True)
class Mine(Plain):
    margin: float = 1.0
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(MINE, encoding="utf-8")
    return path


def test_a_class_of_a_file_takes_its_fields_as_parameters(file: Path) -> None:
    assert repr(parse_policy(f"{file}:Mine:margin=2.5")) == "Mine(margin=2.5)"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("", "names no class"),
        (":Plain", "class Plain is not a dataclass"),
        (":Mine:margin=x", "'x' is not a number"),
        (":Mines", "Did you mean Mine"),
    ],
)
def test_a_class_that_cannot_be_used_is_bad_input(
    file: Path, words: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (file.parent / "jobs.csv").write_text("job,submit_s,gpus,work_s\na,0,1,5\n")
    trace = ["--trace", str(file.parent / "jobs.csv"), "--cluster", "1x1xV100"]
    assert run(["simulate", *trace, "--policy", f"{file}{words}"]) == 2
    assert told in capsys.readouterr().err


def test_a_file_without_a_policy_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "none.py").write_text("class Other: ...\n")
    with pytest.raises(InputError, match=r"none\.py: defines no policy"):
        parse_policy(f"{tmp_path}/none.py:Other")


@pytest.mark.parametrize("value", ["nan", "-NaN"])
def test_a_parameter_is_not_nan(value: str) -> None:
    with pytest.raises(InputError, match="is not a number"):
        parse_policy(f"carpool:patience_s={value}")
