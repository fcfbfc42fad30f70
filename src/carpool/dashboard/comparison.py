"""Policy comparison: tables and charts from reports of ``carpool simulate``, in a folder or uploaded."""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from carpool.core.errors import InputError
from carpool.dashboard.chart import Chart, chart
from carpool.service.auth import Principal
from carpool.service.service import NotFound
from carpool.sim.report.comparison_table import MEASURES, Measure, column, measured, winners
from carpool.sim.report.recording import Recording, RunRecord

MOST_POLICIES = 24

_DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)


@dataclass(frozen=True, slots=True)
class Cell:
    """One value, and its part of the greatest in the column."""

    words: str
    part: float
    is_best: bool


@dataclass(frozen=True, slots=True)
class Column:
    """One measure of every policy."""

    name: str
    unit: str
    hint: str
    is_more_better: bool
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Policies side by side."""

    trace: str
    cluster: str
    policies: tuple[str, ...]
    jobs: tuple[str, ...]  # finished of submitted, in words
    columns: tuple[Column, ...]
    jct: Chart  # share of jobs that were over after so long; only from a page
    busy: Chart


def read_comparison(text: str, where: str) -> Comparison:
    """A comparison from either form; InputError that says what is wrong with it."""
    found = _DATA.search(text)
    try:
        document = json.loads(found[1] if found else text)
        return _compare(document)
    except (json.JSONDecodeError, RecursionError) as error:
        raise _unusable(where, f"is no JSON: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _unusable(where, f"is not what carpool simulate writes: {type(error).__name__} {error}") from error


def _unusable(where: str, problem: str) -> InputError:
    way_out = "Make one with: carpool simulate --trace … --cluster … --policy … --policy … --json > report.json"
    return InputError(problem, where=where, way_out=way_out)


def _compare(document: Mapping[str, Any]) -> Comparison:
    results = document["results"] if "results" in document else [_of_page(run) for run in document["runs"]]
    runs = [RunRecord(str(result["policy"]), result, Recording(1)) for result in results[:MOST_POLICIES]]
    if not runs:
        raise ValueError("no policy in it")
    return Comparison(
        str(document.get("trace", "")),
        str(document.get("cluster", "")),
        tuple(run.policy for run in runs),
        tuple(f"{int(result['finished']):,} of {int(result['jobs']):,}" for result in results[:MOST_POLICIES]),
        tuple(
            _column(runs, measure) for measure in MEASURES if any(measured(run, measure) is not None for run in runs)
        ),
        _chart(document, "jct", "x", "y", is_log=True),
        _chart(document, "busy", "at", "mean"),
    )


def _of_page(run: Mapping[str, Any]) -> dict[str, Any]:
    return {"policy": run["policy"], "jobs": run["jobs"], **run["summary"]}


def _column(runs: Sequence[RunRecord], measure: Measure) -> Column:
    unit, texts = column(runs, measure)
    values = [measured(run, measure) for run in runs]
    greatest = max((value for value in values if value is not None), default=0.0)
    cells = tuple(
        Cell(words, 0.0 if value is None or greatest <= 0 else max(0.0, value / greatest), best)
        for words, value, best in zip(texts, values, winners(runs, measure), strict=True)
    )
    return Column(measure.name, unit, measure.hint, measure.higher_is_better, cells)


def _chart(document: Mapping[str, Any], key: str, across: str, up: str, *, is_log: bool = False) -> Chart:
    lines = [
        (str(run["policy"]), [(float(x), float(y)) for x, y in zip(run[key][across], run[key][up], strict=True)])
        for run in document.get("runs", [])[:MOST_POLICIES]
        if key in run
    ]
    return chart(lines, over_time=True, is_log=is_log, from_zero=True, stepwise=True)


LARGEST_BYTES = 64 << 20  # of a file in the folder

_KEPT = 64  # comparisons that were handed in, by all people together
_ENDINGS = (".json", ".html")


class ReportEntry(NamedTuple):
    """A comparison that can be looked at."""

    key: str
    name: str
    at: float  # when it was written; 0: handed in


class Reports:
    """Comparisons by key. Those that were handed in are kept in memory, the newest ones, for whoever handed them in."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._handed_in: OrderedDict[tuple[str, str], tuple[str, Comparison]] = OrderedDict()

    def listed(self, who: Principal) -> list[ReportEntry]:
        """All that somebody can look at: their own first, then the folder's, newest first."""
        handed_in = reversed(self._handed_in.items())
        own = [ReportEntry(key, name, 0.0) for (owner, key), (name, _) in handed_in if owner == who.name]
        files = [ReportEntry(path.name, path.name, path.stat().st_mtime) for path in self._files()]
        return own + sorted(files, key=lambda each: -each.at)

    def hand_in(self, who: Principal, name: str, text: str) -> str:
        """Take in a comparison; its key."""
        key = sha256(text.encode()).hexdigest()[:20]
        name = Path(name.replace("\\", "/")).name[:80] or "pasted"
        self._handed_in[who.name, key] = (name, read_comparison(text, name))
        self._handed_in.move_to_end((who.name, key))
        while len(self._handed_in) > _KEPT:
            self._handed_in.popitem(last=False)
        return key

    def get(self, who: Principal, key: str) -> tuple[str, Comparison]:
        """A comparison and its name; reads a file."""
        own = self._handed_in.get((who.name, key))
        if own is not None:
            return own
        path = next((path for path in self._files() if path.name == key), None)
        if path is None:
            raise NotFound(f"there is no report {key!r}")
        if path.stat().st_size > LARGEST_BYTES:
            raise InputError(
                f"has {path.stat().st_size:,} bytes, more than {LARGEST_BYTES:,}",
                where=path.name,
                way_out="Use --json instead of --report.",
            )
        return path.name, read_comparison(path.read_text(encoding="utf-8", errors="replace"), path.name)

    def _files(self) -> list[Path]:
        """Only what lies in the folder itself: a key is compared with names, never joined to a path."""
        if self._folder is None or not self._folder.is_dir():
            return []
        return [path for path in self._folder.iterdir() if path.suffix in _ENDINGS and path.is_file()]
