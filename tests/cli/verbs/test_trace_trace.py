"""The verb trace: generate, info, convert."""

import json
from pathlib import Path

import pytest

from carpool.cli.main import run


def test_generate_info_and_convert(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "made.csv"
    assert run(["trace", "generate", str(path), "--jobs", "50", "--devices", "8", "--load", "0.5", "--seed", "7"]) == 0
    again = tmp_path / "again.csv.gz"
    assert run(["trace", "convert", str(path), str(again)]) == 0
    capsys.readouterr()
    assert run(["trace", "info", str(again), "--devices", "8", "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    assert info["jobs"] == 50
    assert run(["trace", "info", str(path), "--devices", "8"]) == 0
    assert "50 jobs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--jobs", "0"], "jobs"),
        (["--load", "0.5", "--rate", "2"], "how fast jobs arrive"),
        (["--arrivals", "poison"], "Did you mean poisson"),
        (["--lengths", "lognormal:median=3"], "median_s"),
        (["--sizes", "x:1"], "whole number"),
    ],
)
def test_bad_recipes_write_nothing(
    tmp_path: Path, args: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "made.csv"
    assert run(["trace", "generate", str(path), *args]) == 2
    assert words in capsys.readouterr().err
    assert not path.exists()
