"""Job detail: loss, rate and device curves of one job, and its allocation in words."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import tzinfo

from carpool.dashboard.chart import Chart, Point, chart
from carpool.dashboard.time_window import TimeWindow
from carpool.dashboard.timeline import Timeline, draw_timeline
from carpool.service.queries.views import DeviceShareView, DeviceView, JobView, MeasurementView, SpanView

_NUMBERED = re.compile(r"(.*?)(\d{1,9})", re.ASCII)


@dataclass(frozen=True, slots=True)
class JobCurves:
    """What a job has reported."""

    loss: Chart
    rate: Chart
    held: Chart
    metrics: tuple[tuple[str, Chart], ...]
    places: Timeline  # the devices it was on, and when


def job_curves(
    job: JobView,
    measured: Sequence[MeasurementView],
    spans: Sequence[SpanView],
    devices: Iterable[DeviceView],
    now: float,
    zone: tzinfo,
) -> JobCurves:
    """The curves of a job: loss over steps, rate and devices over time since it was submitted; and where it was."""
    began, lived_s = job.submitted_at, (job.ended_at or now) - job.submitted_at
    rates = [(each.at - began, each.steps_per_s) for each in measured if each.steps_per_s is not None]
    held = held_over_time(job, spans, now)
    names = sorted({name for each in measured for name in each.metrics})
    touched = {span.device for span in spans}
    return JobCurves(
        chart([("loss", [(each.step, each.loss) for each in measured if each.loss is not None])]),
        chart([("steps/s", rates)], over_time=True, until=lived_s, from_zero=True),
        chart([("devices", held)], over_time=True, until=lived_s, from_zero=True, stepwise=True),
        tuple(
            (name, chart([(name, [(each.step, each.metrics[name]) for each in measured if name in each.metrics])]))
            for name in names[:4]
        ),
        draw_timeline(
            [device for device in devices if device.id in touched],
            spans,
            TimeWindow(began, began + max(1.0, lived_s)),
            now,
            zone,
        ),
    )


def held_over_time(job: JobView, spans: Iterable[SpanView], now: float) -> list[Point]:
    """Devices held, each counted by its fraction, at the instants at which that changed."""
    changes: defaultdict[float, float] = defaultdict(float)
    for span in spans:
        if span.job == job.id:
            changes[span.since] += span.fraction
            if span.until is not None:
                changes[span.until] -= span.fraction
    if not changes:
        return []
    held, points = 0.0, [(0.0, 0.0)]
    for at in sorted(changes):
        held += changes[at]
        points.append((at - job.submitted_at, round(held, 6)))
    end = now if job.ended_at is None else job.ended_at
    return [*points, (max(end - job.submitted_at, points[-1][0]), points[-1][1])]


def describe_holdings(holds: Sequence[DeviceShareView]) -> str:
    """What is held in a few words: runs of devices joined, with fractions where they are not whole."""
    runs: list[tuple[str, int, int, float]] = []  # stem, first and last number, fraction
    for each in holds:
        found = _NUMBERED.fullmatch(each.name)
        stem, number = (found[1], int(found[2])) if found else (each.name, -1)
        if runs and found and (runs[-1][0], runs[-1][2] + 1, runs[-1][3]) == (stem, number, each.fraction):
            runs[-1] = (stem, runs[-1][1], number, each.fraction)
        else:
            runs.append((stem, number, number, each.fraction))
    named = [_run_in_words(*run) for run in runs]
    return ", ".join(named[:6]) + (f" and {len(named) - 6} more" if len(named) > 6 else "") or "nothing"


def _run_in_words(stem: str, first: int, last: int, fraction: float) -> str:
    number = "" if first < 0 else str(first) if first == last else f"{first}–{last}"
    return f"{stem}{number}" + ("" if fraction == 1.0 else f" at {fraction:.0%}")
