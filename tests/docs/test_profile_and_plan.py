"""The page on profiles and plans: its files and commands work."""

import json
import re
import shlex
from pathlib import Path

import pytest

from carpool.cli.main import run

pytest.importorskip("torch")

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "profile-and-plan.md"
BLOCK = re.compile(r"^```\w+ file=(\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_commands_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    files = dict(BLOCK.findall(PAGE.read_text(encoding="utf-8")))
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    said = []
    for line in (files["commands.sh"] + files["simulate.sh"]).splitlines():
        assert run(shlex.split(line)[1:]) == 0, capsys.readouterr().err
        said.append(capsys.readouterr().out)
    profiled, planned, _ = said
    assert "kept in .carpool/profiles/net-net-" in profiled
    assert planned.count("measured (±") == 2
    assert "guessed" not in planned
    assert run([*shlex.split(files["simulate.sh"])[1:], "--json"]) == 0
    makespan_s = json.loads(capsys.readouterr().out)["results"][0]["makespan_s"]
    assert makespan_s > 40.0  # 20 s each, one after another, and what starting them took when it was measured
