"""SVG figure of a comparison: distribution of completion times above a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from carpool.sim.report.comparison_table import MEASURES, Measure, column, winners
from carpool.sim.report.curves import Distribution, completion_times, distribution
from carpool.sim.report.recording import RunRecord

WIDTH = 860
LEFT, RIGHT, TOP, BOTTOM = 56, WIDTH - 20, 20, 270  # of the chart's inside
ROW = 26
POINTS = 300
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#b4578f", "#e69f00", "#56b4e9", "#4a4f55")
DASHES = ("", "7 3", "2 2.5", "9 3 2 3", "4 2", "1 2", "12 3")
INK, SOFT, LINE = "#16191d", "#5b6470", "#e2e5e9"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, 'Liberation Sans', sans-serif"
STOPS = (
    (1e-3, "1 ms"), (1e-2, "10 ms"), (0.1, "0.1 s"), (1.0, "1 s"), (10.0, "10 s"), (60.0, "1 min"), (600.0, "10 min"),
    (3600.0, "1 h"), (21600.0, "6 h"), (86400.0, "1 d"), (864000.0, "10 d"), (8640000.0, "100 d"),
)  # fmt: skip
SHOWN = ("avg_jct_s", "p50_jct_s", "p99_jct_s", "avg_wait_s", "makespan_s", "utilisation")


def _text(x: float, y: float, words: str, *, anchor: str = "start", fill: str = INK, bold: bool = False) -> str:
    weight = ' font-weight="650"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}"{weight}>{escape(words)}</text>'


def _rule(x1: float, y1: float, x2: float, y2: float, stroke: str = LINE) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{stroke}"/>'


def _stroke(place: int) -> str:
    dash = DASHES[(place + place // len(COLOURS)) % len(DASHES)]
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'stroke="{COLOURS[place % len(COLOURS)]}" stroke-width="2"{dashes}'


def _range(curves: Sequence[Distribution]) -> tuple[float, float]:
    values = [value for curve in curves for value in curve.value if value > 0]
    if not values:
        return 0.1, 10.0
    high = max(values)
    low = max(min(values), high / 1e6)
    return low / 1.15, max(high * 1.15, low * 2)


def _path(curve: Distribution, low: float, high: float) -> str:
    """The steps of one distribution on a logarithmic axis."""
    wide = math.log(high / low)
    parts = [f"M{LEFT} {BOTTOM}"]
    for value, share in zip(curve.value, curve.share, strict=True):
        x = LEFT + (RIGHT - LEFT) * math.log(max(value, low) / low) / wide
        parts.append(f"H{x:.1f}V{BOTTOM - (BOTTOM - TOP) * share:.1f}")
    return "".join(parts) + f"H{RIGHT}"


def _axes(low: float, high: float) -> list[str]:
    parts: list[str] = []
    for quarter in range(5):
        y = BOTTOM - (BOTTOM - TOP) * quarter / 4
        parts += [_rule(LEFT, y, RIGHT, y), _text(LEFT - 8, y + 4, f"{25 * quarter} %", anchor="end", fill=SOFT)]
    for stop, words in STOPS:
        if low <= stop <= high:
            x = LEFT + (RIGHT - LEFT) * math.log(stop / low) / math.log(high / low)
            parts += [_rule(x, TOP, x, BOTTOM + 4), _text(x, BOTTOM + 18, words, anchor="middle", fill=SOFT)]
    parts.append(_text(RIGHT, BOTTOM + 36, "completion time, log scale", anchor="end", fill=SOFT))
    parts.append(_text(4, BOTTOM + 36, "share of jobs", fill=SOFT))
    return parts


def _chart(runs: Sequence[RunRecord]) -> list[str]:
    curves = [distribution(completion_times(run.recording), max(1, len(run.recording)), POINTS) for run in runs]
    if not any(curve.value for curve in curves):
        middle = (TOP + BOTTOM) / 2
        return [_text(WIDTH / 2, middle, "no finished job to draw", anchor="middle", fill=SOFT)]
    low, high = _range(curves)
    parts = _axes(low, high)
    for place, (run, curve) in enumerate(zip(runs, curves, strict=True)):
        if curve.value:
            title = f"<title>{escape(run.policy)}</title>"
            path = _path(curve, low, high)
            parts.append(f'<path d="{path}" fill="none" {_stroke(place)} stroke-linejoin="round">{title}</path>')
    return parts


def _table(runs: Sequence[RunRecord], top: float) -> list[str]:
    shown = [measure for measure in MEASURES if measure.key in SHOWN]
    step = (WIDTH - 20 - 250) / len(shown)
    ends = [250 + step * (place + 1) for place in range(len(shown))]
    parts = [_text(20, top, "policy", fill=SOFT), _rule(20, top + 8, WIDTH - 20, top + 8, SOFT)]
    for place, run in enumerate(runs):
        y = top + ROW * (place + 1)
        parts.append(f'<line x1="20" x2="46" y1="{y - 4:.1f}" y2="{y - 4:.1f}" {_stroke(place)}/>')
        name = run.policy if len(run.policy) <= 28 else run.policy[:27] + "…"
        parts.append(_text(56, y, name, bold=True))
        parts.append(_rule(20, y + 9, WIDTH - 20, y + 9))
    for measure, end in zip(shown, ends, strict=True):
        parts += _column(runs, measure, end, top)
    return parts


def _column(runs: Sequence[RunRecord], measure: Measure, end: float, top: float) -> list[str]:
    unit, texts = column(runs, measure)
    parts = [_text(end, top, f"{measure.name}, {unit}" if unit else measure.name, anchor="end", fill=SOFT)]
    for place, (words, won) in enumerate(zip(texts, winners(runs, measure), strict=True)):
        parts.append(_text(end, top + ROW * (place + 1), words, anchor="end", bold=won))
    return parts


def comparison_svg(runs: Sequence[RunRecord]) -> str:
    """Completion-time distributions over a table of the main numbers, on white; best values are bold."""
    head = BOTTOM + 70
    height = head + ROW * len(runs) + 22
    names = ", ".join(run.policy for run in runs)
    body = "".join([*_chart(runs), *_table(runs, head)])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" font-family="{FONT}" font-size="13"><title>Comparison of {escape(names)}</title>'
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>{body}</svg>'
    )
