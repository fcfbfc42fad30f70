"""Run verbs of the command line in this process against a daemon in a thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from carpool.cli.main import run
from carpool.runtime.executor.job_folder import JobFolder

if TYPE_CHECKING:
    from tests.support.http_rig import Served


def stdout_of(capsys: pytest.CaptureFixture[str], *args: str, code: int = 0) -> str:
    """Output of a verb that must exit with `code`."""
    assert run(list(args)) == code
    return capsys.readouterr().out


def stderr_of(capsys: pytest.CaptureFixture[str], *args: str, code: int = 2) -> str:
    """Error output of a verb that must exit with `code`."""
    assert run(list(args)) == code
    return capsys.readouterr().err


def job_file(served: Served, *names: str, extra: str = "") -> str:
    """Write a job file with these jobs, each with the lines `extra`, and return its path."""
    path = served.rig.folder / "jobs.toml"
    tables = [f'[[job]]\nname = "{name}"\nentry = "train.py:main"\n{extra}' for name in names]
    path.write_text("\n".join(tables), encoding="utf-8")
    return str(path)


def write_log(served: Served, job: str, text: str) -> None:
    """Write a job's log as its worker would."""
    folder = JobFolder(served.rig.backend.read_model.state, job).path
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "log").write_text(text, encoding="utf-8")
