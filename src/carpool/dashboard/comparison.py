"""What came of simulated runs, policy beside policy: from ``carpool simulate --json``, or from the page it wrote."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from carpool.core.errors import InputError
from carpool.dashboard.chart import Chart, chart
from carpool.sim.report.recording import Recording, RunRecord
from carpool.sim.report.table import MEASURES, Measure, column, measured, winners

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
