"""Every block of the page on writing a policy runs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from carpool.core.topology import Cluster
from carpool.policies.baselines.nonpreemptive import Fifo
from carpool.policies.registry import parse_policy
from carpool.sim.engine import simulate
from carpool.sim.traces.reader import read_trace

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "how-to" / "write-a-policy.md"
BLOCK = re.compile(r"^```\w+ file=(\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Working directory with every file of the page."""
    blocks = dict(BLOCK.findall(PAGE.read_text(encoding="utf-8")))
    assert set(blocks) == {"mine.py", "jobs.csv", "test_mine.py", "look.py"}
    for name, text in blocks.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_policy_is_short(folder: Path) -> None:
    assert len((folder / "mine.py").read_text(encoding="utf-8").splitlines()) <= 30


def test_the_policy_beats_fifo(folder: Path) -> None:
    trace = read_trace(folder / "jobs.csv")
    cluster = Cluster.build([(1, 4, "V100")])
    fifo = simulate(trace.arrivals, cluster, Fifo()).summary()
    for text in ("./mine.py:MyPolicy", "./mine.py:MyPolicy:margin=1.5"):
        mine = simulate(trace.arrivals, cluster, parse_policy(text)).summary()
        assert mine.finished == 5
        assert mine.avg_jct_s < fifo.avg_jct_s


def test_the_commands_run(folder: Path) -> None:
    commands = [
        line.split() for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("carpool simulate ")
    ]
    assert len(commands) == 2
    run(folder, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_mine.py")
    assert "2 devices" in run(folder, "look.py")
    for _, *arguments in commands:
        assert "mine.py:MyPolicy" in run(folder, "-m", "carpool", *arguments)


def run(folder: Path, *arguments: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, check=False, timeout=120, env=env
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
