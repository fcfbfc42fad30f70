"""SVG timelines of several runs on one time axis: one row per device, one bar per allocation."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from carpool.sim.report.comparison_figure import COLOURS, FONT, INK, LINE, SOFT, WIDTH
from carpool.sim.report.recording import RunRecord
from carpool.sim.report.units import duration

LEFT, RIGHT = 96, WIDTH - 20
ROW, GAP, HEAD = 26, 18, 26  # height of a device's row, space between runs, height of a run's heading
_STEPS = (1.0, 2.0, 5.0)  # a tick is one of these times a power of ten
_MOST_TICKS = 8


def timeline_svg(runs: Sequence[RunRecord], devices: Sequence[str]) -> str:
    """One strip for each run, all on the same time axis, so that the shorter run looks shorter."""
    end_s = max((run.recording.span_s()[1] for run in runs), default=0.0) or 1.0
    names = list(dict.fromkeys(name for run in runs for name in run.recording.job_ids))
    colours = {name: COLOURS[place % len(COLOURS)] for place, name in enumerate(names)}
    parts: list[str] = []
    top = 16.0
    for run in runs:
        parts += _strip(run, devices, colours, end_s, top)
        top += HEAD + ROW * len(devices) + GAP
    parts += _axis(end_s, top - GAP + 6)
    height = top + 24
    words = " and ".join(run.policy for run in runs)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" '
        f'height="{height:.0f}" role="img" font-family="{FONT}" font-size="13">'
        f"<title>Timelines: {escape(words)}</title>"
        f'<rect width="{WIDTH}" height="{height:.0f}" fill="#ffffff"/>{"".join(parts)}</svg>'
    )


def _strip(run: RunRecord, devices: Sequence[str], colours: dict[str, str], end_s: float, top: float) -> list[str]:
    recording = run.recording
    last = recording.span_s()[1]
    parts = [
        f'<text x="{LEFT}" y="{top + 12:.1f}" fill="{INK}" font-weight="650">{escape(run.policy)}</text>',
        f'<text x="{RIGHT}" y="{top + 12:.1f}" text-anchor="end" fill="{SOFT}">{escape(duration(last))}</text>',
    ]
    top += HEAD
    for place, name in enumerate(devices):
        y = top + ROW * place
        parts.append(f'<rect x="{LEFT}" y="{y:.1f}" width="{RIGHT - LEFT}" height="{ROW - 4}" fill="{LINE}"/>')
        parts.append(f'<text x="{LEFT - 10}" y="{y + 16:.1f}" text-anchor="end" fill="{SOFT}">{escape(name)}</text>')
    held = recording.holdings
    for job, first, stop, start, end in zip(held.job, held.first, held.stop, held.start_s, held.end_s, strict=True):
        name = recording.job_ids[job]
        rows = [top + ROW * device for device in range(first, stop)]
        parts += [_bar(name, colours[name], start, end, end_s, y) for y in rows]
    return parts


def _bar(name: str, colour: str, start: float, end: float, end_s: float, y: float) -> str:
    x, width = _x(start, end_s), max(1.0, _x(end, end_s) - _x(start, end_s))
    label = ""
    if width > 8 * len(name) + 8:
        label = f'<text x="{x + 6:.1f}" y="{y + 16:.1f}" fill="#ffffff">{escape(name)}</text>'
    title = f"<title>{escape(name)}: {escape(duration(start))} to {escape(duration(end))}</title>"
    return (
        f'<g>{title}<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{ROW - 4}" fill="{colour}" '
        f'stroke="#ffffff"/>{label}</g>'
    )


def _axis(end_s: float, y: float) -> list[str]:
    parts = []
    step = _tick(end_s)
    for place in range(int(end_s / step) + 1):
        x = _x(place * step, end_s)
        words = duration(place * step) if place else "0"
        parts.append(f'<line x1="{x:.1f}" y1="{y - 6:.1f}" x2="{x:.1f}" y2="{y:.1f}" stroke="{SOFT}"/>')
        parts.append(f'<text x="{x:.1f}" y="{y + 14:.1f}" text-anchor="middle" fill="{SOFT}">{escape(words)}</text>')
    return parts


def _tick(end_s: float) -> float:
    power = 1e-3
    while True:
        for step in _STEPS:
            if end_s / (step * power) <= _MOST_TICKS:
                return step * power
        power *= 10.0


def _x(at: float, end_s: float) -> float:
    return LEFT + (RIGHT - LEFT) * at / end_s
