"""Programs on the command line: names, settings and errors."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import click
import pytest

from carpool.cli.main import run
from carpool.cli.support.command_line import ProgramCommand, given_program, job_name, job_options
from carpool.core.errors import InputError


def table_of(*args: str) -> dict[str, Any]:
    """The job table that a command with these arguments gets."""
    found: list[Any] = []

    @click.command(cls=ProgramCommand)
    @click.argument("jobs", required=False)
    @job_options
    def verb(jobs: str | None, name: str, resumable: bool, env: tuple[str, ...], settings: tuple[str, ...]) -> None:
        found.append(given_program(name, resumable, env, settings, jobs))

    verb.main(list(args), standalone_mode=False)
    if found[0] is None:
        return {}
    (table,) = found[0]["job"]
    assert isinstance(table, dict)
    return table


def test_a_program_keeps_its_own_options() -> None:
    table = table_of("--resumable", "--", "sh", "run.sh", "--name", "x", "--", "--help")
    assert table == {"name": "run", "command": ["sh", "run.sh", "--name", "x", "--", "--help"], "resumable": True}


def test_python_is_the_one_of_the_users_shell() -> None:
    table = table_of("--", "python", "train.py")
    assert table["command"] == ["python", "train.py"]
    assert table["python"] == shutil.which("python")


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("python train.py --data a.py", "train"),
        ("python -m lab.train --out x.py", "lab.train"),
        ("torchrun --nproc-per-node 2 src/big_net.py", "big_net"),
        ("/usr/bin/env bash ../run.sh", "run"),
        ("sleep 5", "sleep"),
        ("./my$prog", "my-prog"),
        ("python -c pass", "python"),
        ("...", "command"),
        ("python -m", "command"),
    ],
)
def test_a_job_is_named_after_its_script(command: str, name: str) -> None:
    assert job_name(command.split()) == name


def test_settings_are_toml_or_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERE", "1")
    args = ["--set", "memory=6GiB", "--set", "retries=2", "--set", 'kinds=["cpu1"]', "--env", "A=b=c", "--env", "HERE"]
    table = table_of("--name", "mine", *args, "--", "true")
    assert table == {
        "name": "mine",
        "command": ["true"],
        "memory": "6GiB",
        "retries": 2,
        "kinds": ["cpu1"],
        "environment": {"A": "b=c", "HERE": "1"},
    }
    assert table_of("jobs.toml") == {}


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (["--"], "no program"),
        (["jobs.toml", "--", "true"], "jobs.toml"),
        (["--name", "x", "jobs.toml"], "--name needs"),
        (["--set", "memory", "--", "true"], "KEY=VALUE"),
        (["--set", "command=x", "--", "true"], "command"),
        (["--env", "NOT_SET_HERE", "--", "true"], "NOT_SET_HERE"),
    ],
)
def test_mistakes_are_input_errors(args: list[str], problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        table_of(*args)


@pytest.mark.parametrize("verb", ["submit", "run"])
@pytest.mark.parametrize(
    ("args", "problem"),
    [
        ([], "-- python"),
        (["--set", "wieght=2", "--", "true"], "weight"),
        (["--", "slepe", "5"], "sleep"),
        (["--", "./none"], "none"),
        (["--", "python", "tarin.py"], "train.py"),
    ],
)
def test_a_wrong_program_is_found_before_anything_starts(
    verb: str,
    args: list[str],
    problem: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CARPOOL_STATE", str(tmp_path / "state"))
    (tmp_path / "train.py").touch()
    assert run([verb, *args]) == 2
    assert problem in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.py"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["python", "train.py", "--lr", "0.1"], ["'python' is not a job file", "-- python train.py --lr 0.1."]),
        (["train.py"], ["'train.py' is not a job file", "-- python train.py."]),
        (["run.sh", "x"], ["'run.sh' is not a job file", "-- run.sh x."]),
        (["train.py:net"], ["'train.py:net' is not a job file", 'entry = "train.py:net"']),
        (["--priority", "high", "--", "true"], ["no such option '--priority'", "--set priority=VALUE"]),
        (["--max-devices", "2", "jobs.toml"], ["no such option '--max_devices'", "--set max_devices=VALUE"]),
    ],
)
def test_a_program_or_key_in_the_wrong_place_is_answered_with_the_right_one(args: list[str], words: list[str]) -> None:
    with pytest.raises(InputError) as told:
        table_of(*args)
    assert [word for word in words if word not in str(told.value)] == []


def test_other_wrong_options_are_reported_as_they_are() -> None:
    with pytest.raises(click.NoSuchOption):
        table_of("--bla", "jobs.toml")
    with pytest.raises(click.UsageError, match="unexpected extra argument"):
        table_of("a.toml", "b.toml")
