"""The verb demo: leaves a trace, a page and a picture."""

from pathlib import Path

import pytest

from carpool.cli.main import run


def test_demo_leaves_a_page_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["demo", "--simulated", "--out", str(tmp_path / "shown"), "--jobs", "60"]) == 0
    assert {path.name for path in (tmp_path / "shown").iterdir()} == {"demo.csv", "demo.html", "demo.svg"}
    printed = capsys.readouterr().out
    assert "sooner than under fifo" in printed
    assert "60/60" in printed
