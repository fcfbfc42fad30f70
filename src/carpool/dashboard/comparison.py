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

MAX_POLICIES = 24

_DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)


@dataclass(frozen=True, slots=True)
class Cell:
    """One value as text, and as a fraction of the column's maximum."""

    text: str
    fraction: float
    is_best: bool


@dataclass(frozen=True, slots=True)
class Column:
    """One metric of every policy."""

    name: str
    unit: str
    hint: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Policies side by side."""

    trace: str
    cluster: str
    policies: tuple[str, ...]
    jobs: tuple[str, ...]  # "finished of submitted"
    columns: tuple[Column, ...]
    jct: Chart  # CDF of completion times; only from a report page
    busy: Chart


def read_comparison(text: str, where: str) -> Comparison:
    """Read a comparison from ``simulate --json`` output or a report page; InputError if it is neither."""
    embedded = _DATA.search(text)
    try:
        return _compare(json.loads(embedded[1] if embedded else text))
    except (json.JSONDecodeError, RecursionError) as error:
        raise _unusable(where, f"not valid JSON: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _unusable(where, f"not a report of carpool simulate: {type(error).__name__} {error}") from error


def _unusable(where: str, problem: str) -> InputError:
    way_out = "Create one with: carpool simulate --trace … --cluster … --policy … --policy … --json > report.json"
    return InputError(problem, where=where, way_out=way_out)


def _compare(document: Mapping[str, Any]) -> Comparison:
    results = document["results"] if "results" in document else [_page_result(run) for run in document["runs"]]
    runs = [RunRecord(str(result["policy"]), result, Recording(1)) for result in results[:MAX_POLICIES]]
    if not runs:
        raise ValueError("it has no policies")
    return Comparison(
        str(document.get("trace", "")),
        str(document.get("cluster", "")),
        tuple(run.policy for run in runs),
        tuple(f"{int(result['finished']):,} of {int(result['jobs']):,}" for result in results[:MAX_POLICIES]),
        tuple(
            _column(runs, measure) for measure in MEASURES if any(measured(run, measure) is not None for run in runs)
        ),
        _chart(document, "jct", "x", "y", is_log=True),
        _chart(document, "busy", "at", "mean"),
    )


def _page_result(run: Mapping[str, Any]) -> dict[str, Any]:
    return {"policy": run["policy"], "jobs": run["jobs"], **run["summary"]}


def _column(runs: Sequence[RunRecord], measure: Measure) -> Column:
    unit, texts = column(runs, measure)
    values = [measured(run, measure) for run in runs]
    maximum = max((value for value in values if value is not None), default=0.0)
    cells = tuple(
        Cell(text, 0.0 if value is None or maximum <= 0 else max(0.0, value / maximum), best)
        for text, value, best in zip(texts, values, winners(runs, measure), strict=True)
    )
    return Column(measure.name, unit, measure.hint, cells)


def _chart(document: Mapping[str, Any], key: str, across: str, up: str, *, is_log: bool = False) -> Chart:
    lines = [
        (str(run["policy"]), [(float(x), float(y)) for x, y in zip(run[key][across], run[key][up], strict=True)])
        for run in document.get("runs", [])[:MAX_POLICIES]
        if key in run
    ]
    return chart(lines, over_time=True, is_log=is_log, from_zero=True, stepwise=True)


MAX_BYTES = 64 << 20  # of a file in the directory

_MAX_UPLOADS = 64  # kept in memory, of all users together
_SUFFIXES = (".json", ".html")


class ReportEntry(NamedTuple):
    """An available report."""

    key: str
    name: str
    at: float  # modification time; 0: uploaded


class Reports:
    """Reports by key: files in a folder, and each user's newest uploads, kept in memory."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._uploads: OrderedDict[tuple[str, str], tuple[str, Comparison]] = OrderedDict()

    def listed(self, principal: Principal) -> list[ReportEntry]:
        """Reports available to a principal: own uploads first, then files, each newest first."""
        newest = reversed(self._uploads.items())
        own = [ReportEntry(key, name, 0.0) for (owner, key), (name, _) in newest if owner == principal.name]
        files = [ReportEntry(path.name, path.name, path.stat().st_mtime) for path in self._files()]
        return own + sorted(files, key=lambda each: -each.at)

    def upload(self, principal: Principal, name: str, text: str) -> str:
        """Store a report in memory; returns its key."""
        key = sha256(text.encode()).hexdigest()[:20]
        name = Path(name.replace("\\", "/")).name[:80] or "pasted"
        self._uploads[principal.name, key] = (name, read_comparison(text, name))
        self._uploads.move_to_end((principal.name, key))
        while len(self._uploads) > _MAX_UPLOADS:
            self._uploads.popitem(last=False)
        return key

    def get(self, principal: Principal, key: str) -> tuple[str, Comparison]:
        """Name and contents of a report; may read a file."""
        own = self._uploads.get((principal.name, key))
        if own is not None:
            return own
        path = next((path for path in self._files() if path.name == key), None)
        if path is None:
            raise NotFound(f"unknown report {key!r}")
        if path.stat().st_size > MAX_BYTES:
            raise InputError(
                f"{path.stat().st_size:,} bytes; the limit is {MAX_BYTES:,}",
                where=path.name,
                way_out="Use the output of --json instead of --report.",
            )
        return path.name, read_comparison(path.read_text(encoding="utf-8", errors="replace"), path.name)

    def _files(self) -> list[Path]:
        """Files directly in the folder: keys are compared with names and never joined to a path."""
        if self._folder is None or not self._folder.is_dir():
            return []
        return [path for path in self._folder.iterdir() if path.suffix in _SUFFIXES and path.is_file()]
