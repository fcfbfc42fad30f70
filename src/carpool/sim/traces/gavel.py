"""Gavel's `.trace` files: tab-separated, without a header, work counted in steps."""

from __future__ import annotations

from collections.abc import Sequence

from carpool.sim.traces.cells import Cells
from carpool.sim.traces.format import Format, TraceRow
from carpool.sim.traces.trace import WorkUnit

COLUMNS = (
    "job type", "command", "working dir", "step flag", "needs data dir", "total steps", "scale factor",
    "priority weight", "SLO", "arrival s",
)  # fmt: skip


def _row(row: Cells) -> TraceRow:
    """Read one row; the job type with its batch size is the model that Gavel's throughput table knows."""
    return TraceRow(
        submit_s=row.number("arrival s"),
        id=str(row.index),
        gpus=row.count("scale factor"),
        work=row.number("total steps"),
        model=row.name("job type"),
        weight=row.positive("priority weight"),
    )


def _is_job(first: Sequence[str]) -> bool:
    """Whether a file that starts with these cells is one of Gavel's."""
    return len(first) == len(COLUMNS)


GAVEL = Format("gavel", COLUMNS, _row, delimiter="\t", has_own_ids=False, headerless=_is_job, work_unit=WorkUnit.STEPS)
