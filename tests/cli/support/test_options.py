"""With --json, stdout has only the result, even if a user's policy prints."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from carpool.cli.main import run
from carpool.cli.verbs import run as run_verb
from carpool.jobs.devices import LocalDevice
from tests.support.fake_executor import FakeExecutor

PRINTING_POLICY = """
from dataclasses import dataclass
from carpool.policies.baselines.nonpreemptive import Fifo
print("imported")

@dataclass(frozen=True)
class Printing(Fifo):
    def plan(self, view):
        print("planning")
        return super().plan(view)
"""
JOBS = '[[job]]\nname = "a"\nentry = "train.py:main"\n'


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory with a trace, a job file and a policy that prints, and a fake executor."""

    async def start(devices: Sequence[LocalDevice], state: Path, **options: object) -> FakeExecutor:
        return FakeExecutor({"a": 10}, batch=(8, 80), at_once=True)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_verb, "launch", lambda environment: None)
    monkeypatch.setattr(run_verb, "start_executor", start)
    files = {
        "mine.py": PRINTING_POLICY,
        "train.py": "def main(): ...\n",
        "jobs.toml": JOBS,
        "jobs.csv": "job,submit_s,gpus,work_s\na,0,1,10\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    "args",
    [
        ("simulate", "--trace", "jobs.csv", "--cluster", "1x1xV100"),
        ("plan", "jobs.toml", "--devices", "cpu:1"),
        ("run", "jobs.toml", "--devices", "cpu:1", "--no-check"),
    ],
    ids=lambda args: args[0],
)
def test_stdout_has_only_the_result(args: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*args, "--policy", "./mine.py:Printing", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["schema"] == 1
    assert "imported" in err
    assert "planning" in err
