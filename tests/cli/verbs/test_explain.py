"""``carpool why`` from a journal, at the job's end and at an instant."""

import json
from pathlib import Path

import pytest

from carpool.cli.main import run

TRACE = "job,submit_s,gpus,work_s\na,0,1,100\nb,10,1,500\nc,20,1,400\n"


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    (tmp_path / "trace.csv").write_text(TRACE)
    path = tmp_path / "run.jsonl"
    args = ["--cluster", "1x1xV100", "--policy", "carpool", "--journal", str(path), "--json"]
    assert run(["simulate", "--trace", str(tmp_path / "trace.csv"), *args]) == 0
    return path


def test_why_a_job_waits(journal: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert run(["why", "b", "--journal", str(journal), "--at", "30"]) == 0
    assert "b waits" in capsys.readouterr().out


def test_why_a_job_had_its_last_devices(journal: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert run(["why", "b", "--journal", str(journal), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert "holds n0:0" in answer["why"]
    assert "1 V100" in answer["details"]
    assert answer["last_plan"]
    assert answer["ending"].startswith("at 1000.000 s: b ")


def test_why_before_the_submission_says_when_it_is(journal: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["why", "c", "--journal", str(journal), "--at", "5"]) == 2
    error = capsys.readouterr().err
    assert "submitted at 20 s" in error
    assert "unknown" not in error


@pytest.mark.parametrize("args", [["zz"], ["zz", "--at", "5"]])
def test_an_unknown_job_is_bad_input(journal: Path, args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["why", *args, "--journal", str(journal)]) == 2
    error = capsys.readouterr().err
    assert f"{args[0]!r}" in error
    assert str(journal) in error
