"""Results of a sweep or run as a text table or CSV; standard library only."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from carpool.cli.render.job_rows import as_columns, span
from carpool.core.units import format_param

_BEST = "*"
_SHORT_S = 10.0


def results_lines(results: Mapping[str, Any], most: int = 0) -> list[str]:
    """A table, best first, with the best job marked; `most` limits its rows."""
    metric, mode, rows = results["metric"], results["mode"], results["rows"]
    headings = ("", "job", *results["params"], "state", "steps", metric, f"{mode} {metric}", "at step", "time")
    shown = rows[:most] if most else rows
    cells = [_cells(row, results) for row in shown]
    lines = as_columns(headings, cells)
    return [*lines, f"… and {len(rows) - len(shown)} more"] if len(shown) < len(rows) else lines


def _cells(row: Mapping[str, Any], results: Mapping[str, Any]) -> tuple[str, ...]:
    best = row["best"]
    return (
        _BEST if row["job"] == results["best"] else "",
        row["job"],
        *(format_param(row["params"].get(name, "")) for name in results["params"]),
        "stopped" if row["state"] == "cancelled" and row["note"] else row["state"],
        str(row["steps"]),
        _value(row["last"]),
        _value(best),
        "" if best is None else str(best["step"]),
        span(row["time_s"]) if row["time_s"] >= _SHORT_S else f"{row['time_s']:.1f} s",
    )


def _value(point: Mapping[str, Any] | None) -> str:
    return "" if point is None else f"{point['value']:.5g}"


def results_csv(results: Mapping[str, Any]) -> str:
    """One line per job, best first: hyper-parameters, state, steps, time, the chosen metric, and all metrics."""
    others: Sequence[str] = results["metrics"]
    params: Sequence[str] = results["params"]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        ["job", *params, "state", "steps", "time_s", "metric", "last", "best", "best_step", "is_best"]
        + [f"last_{name}" for name in others]
    )
    for row in results["rows"]:
        last, best = row["last"] or {}, row["best"] or {}
        values = [row["params"].get(name, "") for name in params]
        reached = [results["metric"], last.get("value", ""), best.get("value", ""), best.get("step", "")]
        metrics = [row["metrics"].get(name, "") for name in others]
        is_best = int(row["job"] == results["best"])
        writer.writerow([row["job"], *values, row["state"], row["steps"], row["time_s"], *reached, is_best, *metrics])
    return text.getvalue()
