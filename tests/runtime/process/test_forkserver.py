"""The fork server on a machine without torch: commands run, trainings are refused with the way out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HIDE_TORCH = """
import sys


class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")


sys.meta_path.insert(0, NoTorch())
"""


@pytest.fixture
def hidden(tmp_path: Path) -> dict[str, str]:
    """An environment in which Python finds no torch."""
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "sitecustomize.py").write_text(HIDE_TORCH, encoding="utf-8")
    paths = [str(tmp_path / "hidden"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def run(folder: Path, environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "carpool", "run", "--devices", "cpu:1", *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize(
    "program", [["echo", "done"], [sys.executable, "-c", "print('done')"]], ids=["plain", "python"]
)
def test_commands_run_without_torch(tmp_path: Path, hidden: dict[str, str], program: list[str]) -> None:
    done = run(tmp_path, hidden, "--", *program)
    assert done.returncode == 0, done.stderr
    assert "done" in done.stdout


@pytest.mark.parametrize(("options", "code"), [([], 2), (["--no-check"], 1)], ids=["checked", "unchecked"])
def test_trainings_without_torch_name_the_extra(
    tmp_path: Path, hidden: dict[str, str], options: list[str], code: int
) -> None:
    (tmp_path / "jobs.toml").write_text('[[job]]\nname = "net"\nentry = "net.py:net"\n', encoding="utf-8")
    (tmp_path / "net.py").write_text("def net():\n    return None\n", encoding="utf-8")
    done = run(tmp_path, hidden, "jobs.toml", *options)
    assert done.returncode == code
    assert "carpool[torch]" in done.stdout + done.stderr
