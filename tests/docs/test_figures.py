"""Figures on the pages agree with the result files, and every result file names the version it measured."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.docs import federated_figures, live_figures, simulated_figures
from tests.docs.figures import RESULTS, ROOT, Check, problems, text_of

SOURCES = (*simulated_figures.SOURCES, *live_figures.SOURCES, *federated_figures.SOURCES)
FILES = sorted(path for path in RESULTS.glob("*.json") if not path.name.endswith(".stamps.json"))


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.__name__)
def test_the_pages_show_what_was_measured(source: Callable[[], Iterator[Check]]) -> None:
    found = [problem for check in source() for problem in problems(*check)]
    assert not found, "\n".join(found)


def commits_of(document: Any) -> list[str]:
    if isinstance(document, dict):
        own = [document["commit"]] if isinstance(document.get("commit"), str) else []
        return own + [commit for value in document.values() for commit in commits_of(value)]
    return [commit for value in document for commit in commits_of(value)] if isinstance(document, list) else []


def git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


@pytest.fixture(scope="module")
def history() -> tuple[str, ...]:
    if git("rev-parse", "--is-shallow-repository") != "false":
        pytest.skip("needs the whole git history")
    return tuple(git("rev-list", "HEAD").split())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_result_names_a_commit_of_the_history_or_is_marked(path: Path, history: tuple[str, ...]) -> None:
    document = json.loads(path.read_text(encoding="utf-8"))
    commits = commits_of(document)
    assert commits
    known = [
        re.fullmatch("[0-9a-f]{7,40}", commit) and any(full.startswith(commit) for full in history)
        for commit in commits
    ]
    assert all(known) or document.get("commit_note"), "add a commit_note that says which version was measured"


def test_marked_results_are_listed_on_the_page() -> None:
    listed = set(re.findall("`([a-z_0-9]+)`", text_of("docs/results.md#Results of earlier versions")))
    marked = {path.stem for path in FILES if "commit_note" in json.loads(path.read_text(encoding="utf-8"))}
    assert marked == listed - {"commit_note"}
