"""A real browser opens the page from a file and its scripts run to the end."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from carpool.sim.report import RunRecord, render, write_page
from tests.sim.report.samples import empty_run, head, run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--virtual-time-budget=5000", "--dump-dom",
)  # fmt: skip


def body_of(page: Path, profile: Path) -> str:
    """The opening tag of the body after all scripts ran."""
    assert CHROMIUM is not None
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    found = re.search(r"<body[^>]*>", done.stdout)
    return found.group() if found else done.stdout


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
@pytest.mark.parametrize(
    "runs", [[run("fifo", 60), run("</script>", 60)], [empty_run()], []], ids=["two", "empty", "none"]
)
def test_the_scripts_run_without_error(runs: list[RunRecord], tmp_path: Path) -> None:
    for record in runs:
        record.recording.mark(30.0, "node n1 lost")
        record.recording.holdings.coarsen(40)
    page = tmp_path / "page.html"
    write_page(page, render("t", head(), runs))
    assert body_of(page, tmp_path / "profile") == '<body data-ready="1">'
