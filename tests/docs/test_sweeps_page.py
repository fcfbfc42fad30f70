"""The page about sweeps prints what it shows, with real commands and trainings."""

import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("jinja2", reason="the extra 'serve' is not installed")

from tests.support.console_transcript import Reader

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "sweeps.md"


def test_the_commands_print_what_is_shown(tmp_path: Path) -> None:
    for name in ("bin", "home", "work"):
        (tmp_path / name).mkdir()
    command = tmp_path / "bin" / "carpool"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m carpool "$@"\n', encoding="utf-8")
    command.chmod(0o755)
    environment = {
        "HOME": str(tmp_path / "home"),
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        "COLUMNS": "120",
    }
    session = Reader(tmp_path / "work", environment)
    try:
        assert session.follow(PAGE.read_text(encoding="utf-8")) > 5
    finally:
        session.close()


def test_the_random_sweep_is_valid(tmp_path: Path) -> None:
    from carpool.jobs.job_file import read_jobs
    from tests.docs.test_recipes import blocks

    for name, text in blocks("sweeps.md").items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert len(read_jobs(tmp_path / "random.toml").jobs) == 6
