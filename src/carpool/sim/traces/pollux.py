"""Pollux' workloads: the application says how long a job is, so the trace does not."""

from __future__ import annotations

from carpool.sim.traces.cells import Cells
from carpool.sim.traces.format import Format, TraceRow
from carpool.sim.traces.trace import WorkUnit


def _row(row: Cells) -> TraceRow:
    """Read one row."""
    return TraceRow(
        submit_s=row.number("time"),
        id=row.name("name"),
        gpus=row.count("num_replicas"),
        work=None,
        model=row.name("application"),
        batch=row.count("batch_size"),
    )


POLLUX = Format(
    "pollux", ("name", "time", "application", "num_replicas", "batch_size"), _row, work_unit=WorkUnit.UNKNOWN
)
