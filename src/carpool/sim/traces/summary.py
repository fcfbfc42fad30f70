"""Trace statistics: sizes, run times, offered load and users."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from carpool.core.metrics import nearest_rank
from carpool.sim.traces.trace import DroppedRow, Trace, WorkUnit

SCHEMA = 1
_PERCENTILES = (0, 10, 25, 50, 75, 90, 99, 100)


@dataclass(frozen=True, slots=True)
class TraceInfo:
    """A trace in numbers; None where unknown."""

    trace: str
    format: str
    jobs: int
    work_unit: str
    first_submit_s: float
    span_s: float  # from the first to the last submission
    gpus: Mapping[int, int]  # size -> jobs
    work_mean: float | None  # in work_unit, like the percentiles
    work_percentiles: Mapping[int, float]  # nearest rank; empty when the lengths are unknown
    gpu_seconds: float | None
    mean_gpus_busy: float | None  # gpu_seconds / span_s: devices that would just serve it
    devices: int | None  # of the cluster that `load` is for
    load: float | None  # gpu_seconds / (devices · span_s)
    models: Mapping[str, int]
    users: Mapping[str, int]
    dropped: Mapping[str, int]
    dropped_rows: Sequence[DroppedRow]
    notes: Mapping[str, int]

    def as_json(self) -> dict[str, object]:
        return {
            "schema": SCHEMA,
            "trace": self.trace,
            "format": self.format,
            "jobs": self.jobs,
            "work_unit": self.work_unit,
            "first_submit_s": self.first_submit_s,
            "span_s": self.span_s,
            "gpus": {str(size): jobs for size, jobs in self.gpus.items()},
            "work": {
                "mean": self.work_mean,
                **{f"p{percent}": value for percent, value in self.work_percentiles.items()},
            },
            "gpu_seconds": self.gpu_seconds,
            "mean_gpus_busy": self.mean_gpus_busy,
            "devices": self.devices,
            "load": self.load,
            "models": dict(self.models),
            "users": dict(self.users),
            "dropped": dict(self.dropped),
            "dropped_rows": [{"row": row, "reason": reason, "job": job} for row, reason, job in self.dropped_rows],
            "notes": dict(self.notes),
        }


def summarise(trace: Trace, devices: int | None = None) -> TraceInfo:
    """Summarize a trace; with `devices` also the load it offers to that many."""
    specs = [arrival.spec for arrival in trace.arrivals]
    works = sorted([spec.work for spec in specs if spec.work is not None])
    is_timed = trace.work_unit is WorkUnit.SECONDS and len(works) == len(specs)
    gpu_seconds = math.fsum([spec.devices * (spec.work or 0.0) for spec in specs]) if is_timed else None
    first_s, last_s = trace.arrivals[0].submit_s, trace.arrivals[-1].submit_s
    span_s = last_s - first_s
    busy = gpu_seconds / span_s if gpu_seconds is not None and span_s > 0 else None
    return TraceInfo(
        trace=trace.name,
        format=trace.format,
        jobs=len(specs),
        work_unit=str(trace.work_unit),
        first_submit_s=first_s,
        span_s=span_s,
        gpus=dict(sorted(Counter([spec.devices for spec in specs]).items())),
        work_mean=math.fsum(works) / len(works) if works else None,
        work_percentiles={percent: nearest_rank(works, percent / 100) for percent in _PERCENTILES} if works else {},
        gpu_seconds=gpu_seconds,
        mean_gpus_busy=busy,
        devices=devices,
        load=busy / devices if busy is not None and devices else None,
        models=_most_common([spec.model for spec in specs]),
        users=_most_common([spec.user for spec in specs]),
        dropped=trace.dropped,
        dropped_rows=trace.dropped_rows,
        notes=trace.notes,
    )


def _most_common(names: Sequence[str]) -> dict[str, int]:
    """Names by number of jobs, ties by name, without the empty name."""
    counts = Counter(names)
    del counts[""]
    return dict(sorted(counts.items(), key=lambda entry: (-entry[1], entry[0])))


def lines(info: TraceInfo, *, listed: int = 8) -> list[str]:
    """The summary as text, one line per fact; long lists are cut to `listed` entries."""
    text = [
        f"{info.trace}: {info.jobs} jobs, format {info.format}",
        f"submitted over {info.span_s:.0f} s ({info.span_s / 86_400:.1f} days) from {info.first_submit_s:g} s on",
        f"GPUs: {_listing({str(size): jobs for size, jobs in info.gpus.items()}, len(info.gpus))}",
        _work_line(info),
    ]
    if info.gpu_seconds is not None:
        busy = "" if info.mean_gpus_busy is None else f", {info.mean_gpus_busy:.1f} GPUs busy on average"
        text.append(f"GPU time: {info.gpu_seconds:.0f} s ({info.gpu_seconds / 3600:.0f} GPU-hours){busy}")
    if info.load is not None:
        text.append(f"offered load on {info.devices} devices: {info.load:.3f}")
    for what, names in (("models", info.models), ("users", info.users)):
        if names:
            text.append(f"{what} ({len(names)}): {_listing(names, listed)}")
    text.extend([f"dropped {rows}: {reason}" for reason, rows in info.dropped.items()])
    text.extend([f"note ({times}): {note}" for note, times in info.notes.items()])
    return text


def _work_line(info: TraceInfo) -> str:
    if info.work_mean is None:
        return "length: unknown (a world knows it)"
    unit = info.work_unit
    points = ", ".join([f"p{percent} {value:.6g}" for percent, value in info.work_percentiles.items()])
    return f"length in {unit}: mean {info.work_mean:.6g}, {points}"


def _listing(counts: Mapping[str, int], listed: int) -> str:
    shown = ", ".join([f"{name}: {count}" for name, count in list(counts.items())[:listed]])
    more = len(counts) - listed
    return f"{shown} and {more} more" if more > 0 else shown
