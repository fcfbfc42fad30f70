"""A daemon's state goes into a file and comes back, from the command line."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from carpool.cli.main import run


@pytest.fixture
def state(tmp_path: Path) -> Path:
    folder = tmp_path / "state"
    (folder / "jobs" / "a").mkdir(parents=True)
    (folder / "jobs" / "a" / "log").write_text("hello\n", encoding="utf-8")
    return folder


def test_there_and_back(tmp_path: Path, state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    backup, back = str(tmp_path / "b.tar"), tmp_path / "back"
    assert run(["backup", backup, "--state", str(state), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["files"] == 1
    assert run(["restore", backup, "--check"]) == 0
    assert "is whole" in capsys.readouterr().out
    assert run(["restore", backup, "--state", str(back), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == str(back)
    assert (back / "jobs" / "a" / "log").read_text(encoding="utf-8") == "hello\n"
    assert run(["restore", backup, "--state", str(back)]) == 2
    assert "is not empty" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["backup", "restore"])
def test_the_help_has_an_example(verb: str) -> None:
    from carpool.cli.main import carpool

    assert f"Example: carpool {verb} carpool-monday.tar" in CliRunner().invoke(carpool, [verb, "--help"]).output
