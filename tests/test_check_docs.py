"""Tests of the script behind ``make docs``."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parent.parent / "tools" / "check_docs.py"


def check(root: Path) -> tuple[int, list[str]]:
    """The script's exit code and what it says is broken."""
    done = subprocess.run([sys.executable, SCRIPT, root], capture_output=True, text=True, check=False)
    return done.returncode, done.stderr.splitlines()


def test_good_links_pass(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.md").write_text("# One thing: *twice*\n\n# Again\n\n# Again\n\n[up](../index.md)\n")
    (tmp_path / "index.md").write_text(
        "[a](docs/a.md) [b](docs/a.md#one-thing-twice) [c](docs/a.md#again-1) [d](#here) [e](https://example.org/x)\n"
        "`[f](nowhere.md)`\n\n```\n[g](nowhere.md)\n```\n\n# Here\n"
    )
    assert check(tmp_path) == (0, [])


def test_broken_links_are_named(tmp_path: Path) -> None:
    (tmp_path / "index.md").write_text("# Top\n\n[a](gone.md)\n[b](#nowhere)\n\n[c]: also-gone.md\n")
    assert check(tmp_path) == (
        1,
        [
            "index.md:3: gone.md does not exist",
            "index.md:4: #nowhere names no heading of index.md",
            "index.md:6: also-gone.md does not exist",
        ],
    )


def test_hidden_folders_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "theirs.md").write_text("[a](gone.md)\n")
    assert check(tmp_path) == (0, [])
