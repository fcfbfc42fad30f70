"""Data embedded in a page: JSON for curves, packed columns for timelines.

A packed column is little-endian integers, optionally as differences, with the bytes regrouped by significance (which
is what makes them compress), deflated, in base64. `report.js` undoes this with the browser's own `DecompressionStream`.
"""

from __future__ import annotations

import base64
import json
import math
import sys
import zlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import sub

from carpool.sim.report.curves import (
    Distribution,
    SizeClass,
    by_size,
    class_bounds,
    completion_times,
    distribution,
    waiting_times,
)
from carpool.sim.report.recording import BinnedHoldings, Holdings, ReportHead, RunRecord, StepFunction
from carpool.sim.report.units import duration

SCHEMA = 1
CURVE_POINTS = 1_200  # of a distribution
STEP_POINTS = 2_400  # of a step function
PAGE_HOLDINGS = 300_000  # rectangles on the page, over all runs
MAX_TICK = 2**31 - 1

Json = Mapping[str, object]


def pack(column: array[int], *, delta: bool = False) -> Json:
    """A column of integers as text that `report.js` can unpack."""
    if delta and len(column) > 1:
        column = column[:1] + array(column.typecode, map(sub, column[1:], column[:-1]))
    if sys.byteorder == "big":
        column = column[:]
        column.byteswap()
    raw = column.tobytes()
    size = column.itemsize
    planes = b"".join(raw[place::size] for place in range(size))
    text = base64.b64encode(zlib.compress(planes, 7)).decode("ascii")
    return {"bytes": size, "count": len(column), "delta": int(delta), "data": text}


def pack_text(value: object) -> Json:
    """Any JSON value, deflated."""
    raw = json.dumps(value, ensure_ascii=True, separators=(",", ":")).encode("ascii")
    return pack(array("B", raw))


def unpack(packed: Json) -> array[int]:
    """The column that `pack` was given: what `report.js` does, in Python."""
    size, count = int(str(packed["bytes"])), int(str(packed["count"]))
    planes = zlib.decompress(base64.b64decode(str(packed["data"])))
    raw = bytearray(len(planes))
    for place in range(size):
        raw[place::size] = planes[place * count : (place + 1) * count]
    column: array[int] = array({1: "B", 4: "i"}[size])
    column.frombytes(bytes(raw))
    if sys.byteorder == "big":
        column.byteswap()
    if packed["delta"]:
        for place in range(1, count):
            column[place] += column[place - 1]
    return column


def script_json(value: object) -> str:
    """JSON that is safe inside a script element: no text in it can end the element or open a comment."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def finite(value: object) -> object:
    """The value, or None if JSON cannot represent it."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _rounded(values: Iterable[float]) -> list[float]:
    return [float(f"{value:.6g}") for value in values]


def tick_for(span_s: float) -> float:
    """The finest power of ten, from a millisecond up, in which the span fits 31 bits."""
    tick = 0.001
    while span_s / tick > MAX_TICK / 2:
        tick *= 10
    return tick


@dataclass(frozen=True, slots=True)
class RunPlotData:
    """What the page draws of one run: copies, thinned to the page's limits."""

    holdings: Holdings
    queue: StepFunction
    busy: StepFunction


class JobIndex:
    """The jobs that the timelines name, numbered over all runs."""

    def __init__(self, origin_s: float, tick_s: float) -> None:
        self.origin_s = origin_s
        self.tick_s = tick_s
        self.place: dict[str, int] = {}
        self.submit: array[int] = array("i")
        self.devices: array[int] = array("i")

    def tick(self, at_s: float) -> int:
        """A point in time in ticks after the origin; -1: never."""
        return round((at_s - self.origin_s) / self.tick_s) if at_s == at_s else -1

    def number(self, run: RunRecord, job: int) -> int:
        """The number of a run's job, assigned when it is first asked for."""
        recording = run.recording
        job_id = recording.job_ids[job]
        found = self.place.get(job_id)
        if found is None:
            found = self.place[job_id] = len(self.place)
            self.submit.append(self.tick(recording.submit_s[job]))
            self.devices.append(recording.devices[job])
        return found

    def pack(self) -> Json:
        return {
            "ids": pack_text(list(self.place)),
            "submit": pack(self.submit, delta=True),
            "devices": pack(self.devices),
        }


def pack_holdings(run: RunRecord, holdings: Holdings, table: JobIndex) -> Json:
    """The rectangles of one timeline, by start; lengths rather than ends, because they compress."""
    order = sorted(range(len(holdings)), key=lambda place: (holdings.start_s[place], holdings.first[place]))
    numbers = {job: table.number(run, job) for job in sorted(set(holdings.job))}
    start = array("i", [table.tick(holdings.start_s[place]) for place in order])
    end = array("i", [table.tick(holdings.end_s[place]) for place in order])
    return {
        "job": pack(array("i", [numbers[holdings.job[place]] for place in order]), delta=True),
        "first": pack(array("i", [holdings.first[place] for place in order])),
        "width": pack(array("i", [holdings.stop[place] - holdings.first[place] for place in order])),
        "start": pack(start, delta=True),
        "length": pack(array("i", map(sub, end, start))),
        "permille": pack(array("i", [round(1000 * holdings.fraction[place]) for place in order])),
        "jobs": pack(array("i", numbers.values()), delta=True),
        "ends": pack(array("i", [table.tick(run.recording.end_s[job]) for job in numbers])),
        "states": pack(array("B", [run.recording.state[job] for job in numbers])),
    }


def pack_haze(haze: BinnedHoldings, origin_s: float) -> Json | None:
    """The shade of dissolved holdings as one byte for each bin and block."""
    if not haze.cells:
        return None
    num_bins = max(haze.cells) // haze.num_blocks + 1
    full = haze.block * haze.width_s
    scale = max(max(haze.cells.values()) / full, 1e-9)
    grid = array("B", bytes(num_bins * haze.num_blocks))
    for key, amount in haze.cells.items():
        grid[key] = max(1, min(255, round(255 * amount / full / scale)))
    return {
        "block": haze.block,
        "blocks": haze.num_blocks,
        "width_s": haze.width_s,
        "start_s": -origin_s,
        "scale": scale / 255,
        "grid": pack(grid),
    }


def _steps(steps: StepFunction, origin_s: float) -> Json:
    return {
        "at": _rounded(at - origin_s for at in steps.at_s),
        "mean": _rounded(steps.value),
        "peak": _rounded(steps.peak),
    }


def _curve(curve: Distribution) -> Json:
    return {"x": _rounded(curve.value), "y": _rounded(curve.share)}


def _class(group: SizeClass) -> Json:
    return {
        "label": group.label,
        "jobs": group.num_jobs,
        "finished": group.num_finished,
        "avg": group.avg_s,
        "p50": group.p50_s,
        "p99": group.p99_s,
    }


def thinned(run: RunRecord, drawing: RunPlotData) -> list[str]:
    """What the page leaves out of a run, as sentences; empty if it shows everything."""
    words: list[str] = []
    recording, holdings = run.recording, drawing.holdings
    if holdings.num_dissolved:
        total = len(holdings) + holdings.num_dissolved
        words.append(
            f"the {holdings.num_dissolved:,} shortest of {total:,} device holdings (none longer than "
            f"{duration(holdings.longest_dissolved_s)}) are drawn as grey shade, not as rectangles; "
            f"their area is kept"
        )
    curves = (
        ("queue length", drawing.queue, ", with a thin line for their peaks"),
        ("utilisation", drawing.busy, ""),
    )
    for name, steps, peaks in curves:
        if steps.num_merged:
            words.append(
                f"{name}: {len(steps) + steps.num_merged:,} changes drawn as {len(steps):,} means over "
                f"about {duration(steps.width_s)}{peaks}"
            )
    num_finished = len(recording.finished())
    if num_finished > CURVE_POINTS:
        words.append(f"distributions: drawn through about {CURVE_POINTS:,} of {num_finished:,} values")
    if recording.num_marks_dropped:
        words.append(f"{recording.num_marks_dropped:,} further marks are not shown")
    return words


def _run(run: RunRecord, bounds: Sequence[tuple[int, int]], drawing: RunPlotData, table: JobIndex) -> Json:
    recording = run.recording
    return {
        "policy": run.policy,
        "summary": {key: finite(value) for key, value in run.summary.items()},
        "jobs": len(recording),
        "jct": _curve(distribution(completion_times(recording), max(1, len(recording)), CURVE_POINTS)),
        "wait": _curve(distribution(waiting_times(recording), max(1, len(recording)), CURVE_POINTS)),
        "queue": _steps(drawing.queue, table.origin_s),
        "busy": _steps(drawing.busy, table.origin_s),
        "sizes": [_class(group) for group in by_size(recording, bounds)],
        "marks": [[at - table.origin_s, text] for at, text in recording.marks],
        "holdings": pack_holdings(run, drawing.holdings, table),
        "haze": pack_haze(drawing.holdings.haze, table.origin_s),
    }


def drawings(runs: Sequence[RunRecord], limit: int = PAGE_HOLDINGS) -> list[RunPlotData]:
    """What the page draws of every run; all rectangles together stay within `limit`."""
    room, left = limit, len(runs)
    chosen: dict[int, RunPlotData] = {}
    for place in sorted(range(len(runs)), key=lambda place: len(runs[place].recording.holdings)):
        recording = runs[place].recording
        drawing = RunPlotData(recording.holdings.copy(), recording.queue.copy(), recording.busy.copy())
        drawing.holdings.coarsen(room // left)
        drawing.queue.coarsen(STEP_POINTS)
        drawing.busy.coarsen(STEP_POINTS)
        room, left = room - len(drawing.holdings), left - 1
        chosen[place] = drawing
    return [chosen[place] for place in range(len(runs))]


def payload(head: ReportHead, runs: Sequence[RunRecord], drawn: Sequence[RunPlotData]) -> Json:
    """All that the page's scripts need, as one JSON value."""
    spans = [run.recording.span_s() for run in runs if len(run.recording)]
    origin_s = min((start for start, _ in spans), default=0.0)
    span_s = max((end for _, end in spans), default=0.0) - origin_s
    table = JobIndex(origin_s, tick_for(span_s))
    bounds = class_bounds(size for run in runs for size in run.recording.devices)
    packed = [_run(run, bounds, drawing, table) for run, drawing in zip(runs, drawn, strict=True)]
    return {
        "schema": SCHEMA,
        "trace": head.trace,
        "cluster": head.cluster,
        "devices": head.num_devices,
        "nodes": [[node.name, node.first, node.stop, node.kind] for node in head.nodes],
        "tick_s": table.tick_s,
        "span_s": span_s,
        "runs": packed,
        "table": table.pack(),
    }
