"""The architecture page: files of its walks exist, hold the names to read there, and are at most twelve per walk."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
SOURCE = ROOT / "src" / "carpool"
ROW = re.compile(r"^\| \d+ \| `(\S+\.py)` \| (.*) \|$", re.MULTILINE)


def walks() -> dict[str, list[tuple[str, str]]]:
    """Rows of each walk by its heading."""
    part = PAGE.partition("## Walks")[2].partition("\n## ")[0]
    found = {}
    for section in part.split("\n### ")[1:]:
        heading, _, rows = section.partition("\n")
        found[heading] = ROW.findall(rows)
    return found


def test_there_are_four_walks() -> None:
    assert len(walks()) == 4


@pytest.mark.parametrize("heading", walks())
def test_a_walk_leads_through_at_most_twelve_files_that_hold_what_it_names(heading: str) -> None:
    rows = walks()[heading]
    assert 0 < len(rows) <= 12
    assert len({file for file, _ in rows}) == len(rows)
    for file, note in rows:
        text = (SOURCE / file).read_text(encoding="utf-8")
        for name in re.findall(r"`([A-Za-z_.]+)`", note):
            assert re.search(rf"\b(def|class) {name.rpartition('.')[2]}\b", text), f"{file} has no {name}"


def index_rows() -> list[tuple[str, str]]:
    """Question and answer of each row of "Where to look"."""
    index = PAGE.partition("## Where to look")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| (.+) \|$", index, re.MULTILINE)
    return [row for row in rows if row[0] != "question"]


def test_a_question_of_the_index_is_asked_once_and_answered_by_at_most_three_files_that_exist() -> None:
    rows = index_rows()
    assert len(rows) > 100
    assert len({question for question, _ in rows}) == len(rows)
    for question, answer in rows:
        files = re.findall(r"`([\w/]+\.(?:py|js|html))`", answer)
        assert 0 < len(files) <= 3, question
        missing = [file for file in files if not ((SOURCE / file).is_file() or (ROOT / file).is_file())]
        assert missing == [], question


def test_files_of_the_index_hold_the_names_beside_them() -> None:
    noted = [
        (file, note) for _, answer in index_rows() for file, note in re.findall(r"`([\w/]+\.py)` \(([^)]*)\)", answer)
    ]
    assert len(noted) > 100
    missing = [
        f"{file} has no {name}"
        for file, note in noted
        for name in re.findall(r"`([A-Za-z_.]+)`", note)
        if not re.search(rf"\b{name.rpartition('.')[2]}\b", (SOURCE / file).read_text(encoding="utf-8"))
    ]
    assert missing == []


def test_the_list_of_modules_is_up_to_date() -> None:
    check = [sys.executable, str(ROOT / "tools" / "module_index.py"), "--check"]
    done = subprocess.run(check, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


def test_files_of_tables_and_diagrams_exist() -> None:
    named = re.findall(
        r"(?:`|<br/>)((?:core|jobs|policies|predictors|runtime|backends|service|sim|cli)/[\w/]+\.py)", PAGE
    )
    assert len(named) > 40
    assert [file for file in named if not (SOURCE / file).is_file()] == []
