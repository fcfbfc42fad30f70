"""Microsoft's Philly cluster as CSV, with dates (the whole log) or with seconds (an excerpt).

The column `cluster` is Philly's virtual cluster, the tenant whose queue a job stood in: it becomes the job's user.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat

from carpool.sim.traces import cells
from carpool.sim.traces.cells import NO_END, NO_GPU, Cells, Unusable
from carpool.sim.traces.columns import names, numbers, row_ids, shared, stamps
from carpool.sim.traces.format import Columns, Format, RowBlock, TraceRow


def _dated_row(row: Cells) -> TraceRow:
    """Read one row whose submission is a date."""
    return _row(row, row.stamp("timestamp"), str(row.index))


def _timed_row(row: Cells) -> TraceRow:
    """Read one row whose submission is in seconds."""
    return _row(row, row.number("submit_time"), row.name("job_id"))


def _row(row: Cells, submit_s: float, job: str) -> TraceRow:
    """Read what both headers share."""
    gpus = row.whole("num_gpus")
    if gpus == 0:
        raise Unusable(NO_GPU)
    if row.is_empty("duration"):
        raise Unusable(NO_END)
    return TraceRow(submit_s, job, gpus, row.number("duration"), user=row.text("cluster"))


def _dated_block(columns: Columns, start: int) -> RowBlock:
    """Read many clean rows whose submissions are dates."""
    texts = columns["timestamp"]
    return _block(columns, stamps(texts), row_ids(start, len(texts)))


def _timed_block(columns: Columns, start: int) -> RowBlock:
    """Read many clean rows whose submissions are in seconds."""
    return _block(columns, numbers(columns["submit_time"]), columns["job_id"])


def _block(columns: Columns, submits: Sequence[float], ids: Sequence[str]) -> RowBlock:
    """Read what both headers share; a row without GPU is left to the careful reader."""
    gpus = shared(columns["num_gpus"], "num_gpus", cells.count)
    works = numbers(columns["duration"])
    users = names(columns["cluster"]) if "cluster" in columns else repeat("")
    return RowBlock(submits, ids, gpus, works, (repeat(""), repeat(0), repeat(1.0), users))


PHILLY_DATED = Format(
    "philly",
    ("timestamp", "duration", "num_gpus"),
    _dated_row,
    ("cluster",),
    ("gpu_time",),
    block=_dated_block,
    has_own_ids=False,
    from_earliest=True,
)
PHILLY_TIMED = Format(
    "philly",
    ("job_id", "submit_time", "num_gpus", "duration"),
    _timed_row,
    ("cluster",),
    ("gpu_time",),
    block=_timed_block,
)
