"""HTML comparison table and its headline sentence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from carpool.sim.report.recording import RunRecord
from carpool.sim.report.units import SECOND, digits, duration, unit_for


@dataclass(frozen=True, slots=True)
class Measure:
    """One column: a key of ``simulate --json`` and how to read it."""

    key: str
    name: str
    hint: str
    kind: str = "time"  # time, share, count
    higher_is_better: bool = False
    over_finished: bool = True  # only comparable between runs that finished equally many jobs


MEASURES: tuple[Measure, ...] = (
    Measure("avg_jct_s", "avg JCT", "mean completion time: end − submit"),
    Measure("p50_jct_s", "p50 JCT", "median completion time, nearest rank"),
    Measure("p99_jct_s", "p99 JCT", "99th percentile of completion time, nearest rank"),
    Measure("avg_wait_s", "avg wait", "mean of completion time − time holding a device"),
    Measure("weighted_jct_s", "weighted JCT", "Σ weight · completion time / Σ weight"),
    Measure("makespan_s", "makespan", "last end − first submit"),
    Measure("utilisation", "utilisation", "held device-seconds / (devices × makespan)", "share", True),
    Measure("preemptions", "preemptions", "involuntary losses of all devices", "count"),
    Measure("resizes", "resizes", "changes of the devices that a running job holds, or of their number", "count"),
    Measure("wall_s", "wall", "time the simulation itself took", "wall", over_finished=False),
)


def number(run: RunRecord, key: str) -> float | None:
    """A number of a run's summary; None if it is missing, not finite, or meaningless because no job finished."""
    value = run.summary.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def measured(run: RunRecord, measure: Measure) -> float | None:
    """A run's value of a measure; None if it is computed from finished jobs and there are none."""
    if measure.over_finished and measure.kind != "count" and not number(run, "finished"):
        return None
    return number(run, measure.key)


def column(runs: Sequence[RunRecord], measure: Measure) -> tuple[str, list[str]]:
    """A column's unit and its cells as text; a dash where there is no value."""
    values = [measured(run, measure) for run in runs]
    known = [value for value in values if value is not None]
    if measure.kind == "share":
        return "%", ["–" if value is None else f"{100 * value:.1f}" for value in values]
    if measure.kind == "count":
        return "", ["–" if value is None else f"{value:,.0f}" for value in values]
    unit = SECOND if measure.kind == "wall" else unit_for(known)
    return unit.name, ["–" if value is None else digits(value / unit.seconds) for value in values]


def winners(runs: Sequence[RunRecord], measure: Measure) -> list[bool]:
    """Which runs are best in a column, by the digits shown.

    Only runs that finished the most jobs compete, because means over fewer jobs are not comparable. No run wins where
    all look equal.
    """
    most = max((number(run, "finished") or 0.0 for run in runs), default=0.0)
    values = [measured(run, measure) for run in runs]
    fair = [not measure.over_finished or (number(run, "finished") or 0.0) == most for run in runs]
    known = [value for value, ok in zip(values, fair, strict=True) if ok and value is not None]
    if not known:
        return [False] * len(runs)
    top = max(known) if measure.higher_is_better else min(known)
    texts = column(runs, measure)[1]
    shown = texts[values.index(top)]
    won = [ok and text == shown for text, ok in zip(texts, fair, strict=True)]
    return [False] * len(runs) if all(won) else won


def headline(runs: Sequence[RunRecord]) -> str:
    """The result in one sentence of plain text."""
    done = [run for run in runs if number(run, "finished")]
    if not done:
        return "No job finished in any run, so there is nothing to compare yet."
    most = max(number(run, "finished") or 0.0 for run in done)
    fair = [run for run in done if number(run, "finished") == most and number(run, "avg_jct_s") is not None]
    if not fair:
        return ""
    ranked = sorted(fair, key=lambda run: (number(run, "avg_jct_s") or 0.0, run.policy))
    first, last = ranked[0], ranked[-1]
    low, high = number(first, "avg_jct_s") or 0.0, number(last, "avg_jct_s") or 0.0
    short = "" if len(fair) == len(runs) else " among the runs that finished the most jobs"
    if first is last or low == high:
        names = ", ".join(run.policy for run in ranked)
        return f"Average completion time{short}: {duration(low)} with {names}."
    change = f", {100 * (high - low) / high:.0f} % below {last.policy} ({duration(high)})"
    return f"Lowest average completion time{short}: {duration(low)} with {first.policy}{change}."


def _cell(text: str, value: float | None, is_best: bool, measure: Measure) -> str:
    if value is None:
        return f'<td class="num none" data-key="{measure.key}"><span class="v">–</span></td>'
    exact = f"{value:.10g}"
    mark = ' <span class="sr">best</span>' if is_best else ""
    title = f"{exact} s" if measure.kind in ("time", "wall") else exact
    return (
        f'<td class="num{" best" if is_best else ""}" data-key="{measure.key}" data-value="{exact}" title="{title}">'
        f'<span class="v">{text}</span>{mark}<span class="delta"></span></td>'
    )


def _row(place: int, run: RunRecord, cells: Sequence[str]) -> str:
    finished, jobs = number(run, "finished") or 0.0, number(run, "jobs")
    total = float(len(run.recording)) if jobs is None else jobs
    tone = "num" if finished == total and total else "num short"
    return (
        f'<tr data-run="{place}"><th scope="row"><span class="swatch" data-swatch="{place}"></span>'
        f"<span>{escape(run.policy)}</span></th>"
        f'<td class="{tone}" data-key="finished" data-value="{finished:.0f}"><span class="v">{finished:,.0f}</span>'
        f'<span class="of"> of {total:,.0f}</span></td>{"".join(cells)}</tr>'
    )


def comparison_table(runs: Sequence[RunRecord]) -> str:
    """The table as HTML, best values marked; scripts add order and change against a baseline."""
    heads = ['<th scope="col" data-sort="policy">policy</th>', '<th scope="col" data-sort="finished">finished</th>']
    columns: list[list[str]] = []
    for measure in MEASURES:
        unit, texts = column(runs, measure)
        shown = f' <span class="unit">{unit}</span>' if unit else ""
        sense = "max" if measure.higher_is_better else "min"
        heads.append(
            f'<th scope="col" data-sort="{measure.key}" data-sense="{sense}" title="{escape(measure.hint)}">'
            f"{escape(measure.name)}{shown}</th>"
        )
        cells = zip(texts, runs, winners(runs, measure), strict=True)
        columns.append([_cell(text, measured(run, measure), won, measure) for text, run, won in cells])
    rows = [_row(place, run, [cells[place] for cells in columns]) for place, run in enumerate(runs)]
    return (
        '<table id="comparison"><caption class="sr">Comparison of scheduling policies</caption>'
        f"<thead><tr>{''.join(heads)}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    )
