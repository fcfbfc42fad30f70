"""Job detail: loss, rate and device curves of one job, and its devices as text."""

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
    """Curves of a job, and the timeline of its devices."""

    loss: Chart
    rate: Chart
    devices: Chart
    metrics: tuple[tuple[str, Chart], ...]
    timeline: Timeline


def job_curves(
    job: JobView,
    measured: Sequence[MeasurementView],
    spans: Sequence[SpanView],
    devices: Iterable[DeviceView],
    now: float,
    zone: tzinfo,
) -> JobCurves:
    """Loss and metrics over steps, rate and devices over time since submission."""
    start, lifetime_s = job.submitted_at, (job.ended_at or now) - job.submitted_at
    rates = [(each.at - start, each.steps_per_s) for each in measured if each.steps_per_s is not None]
    devices_over_time = count_devices(job, spans, now)
    names = sorted({name for each in measured for name in each.metrics})
    used = {span.device for span in spans}
    return JobCurves(
        chart([("loss", [(each.step, each.loss) for each in measured if each.loss is not None])]),
        chart([("steps/s", rates)], over_time=True, until=lifetime_s, from_zero=True),
        chart([("devices", devices_over_time)], over_time=True, until=lifetime_s, from_zero=True, stepwise=True),
        tuple(
            (name, chart([(name, [(each.step, each.metrics[name]) for each in measured if name in each.metrics])]))
            for name in names[:4]
        ),
        draw_timeline(
            [device for device in devices if device.id in used],
            spans,
            TimeWindow(start, start + max(1.0, lifetime_s)),
            now,
            zone,
        ),
    )


def count_devices(job: JobView, spans: Iterable[SpanView], now: float) -> list[Point]:
    """Allocated devices over time since submission, each counted by its fraction."""
    changes: defaultdict[float, float] = defaultdict(float)
    for span in spans:
        if span.job == job.id:
            changes[span.since] += span.fraction
            if span.until is not None:
                changes[span.until] -= span.fraction
    if not changes:
        return []
    total, points = 0.0, [(0.0, 0.0)]
    for at in sorted(changes):
        total += changes[at]
        points.append((at - job.submitted_at, round(total, 6)))
    end = now if job.ended_at is None else job.ended_at
    return [*points, (max(end - job.submitted_at, points[-1][0]), points[-1][1])]


def format_devices(shares: Sequence[DeviceShareView]) -> str:
    """Format devices with consecutive numbers as ranges, and shares below 1: ``n4:0–1, n4:3 at 50%``."""
    ranges: list[tuple[str, int, int, float]] = []  # stem, first and last number, fraction
    for each in shares:
        found = _NUMBERED.fullmatch(each.name)
        stem, number = (found[1], int(found[2])) if found else (each.name, -1)
        if ranges and found and (ranges[-1][0], ranges[-1][2] + 1, ranges[-1][3]) == (stem, number, each.fraction):
            ranges[-1] = (stem, ranges[-1][1], number, each.fraction)
        else:
            ranges.append((stem, number, number, each.fraction))
    named = [_format_range(*each) for each in ranges]
    return ", ".join(named[:6]) + (f" and {len(named) - 6} more" if len(named) > 6 else "") or "none"


def _format_range(stem: str, first: int, last: int, fraction: float) -> str:
    number = "" if first < 0 else str(first) if first == last else f"{first}–{last}"
    return f"{stem}{number}" + ("" if fraction == 1.0 else f" at {fraction:.0%}")
