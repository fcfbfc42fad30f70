"""Canonical CSV format: job,submit_s,gpus,work_s and optionally model,batch,weight,user."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat

from carpool.sim.traces import cells
from carpool.sim.traces.cells import Cells
from carpool.sim.traces.format import Columns, RowBlock, TraceFormat, TraceRow, names, numbers, shared

UNKNOWN_WORK = "unknown"  # in column work_s: unknown length; an empty cell is an error

REQUIRED = ("job", "submit_s", "gpus", "work_s")
OPTIONAL = ("model", "batch", "weight", "user")


def _row(row: Cells) -> TraceRow:
    """Read one row; nothing is unusable in our own format."""
    return TraceRow(
        submit_s=row.number("submit_s"),
        id=row.name("job"),
        gpus=row.count("gpus"),
        work=None if row.text("work_s") == UNKNOWN_WORK else row.number("work_s"),
        model=row.text("model"),
        batch=_batch(row.text("batch"), "batch"),
        weight=_weight(row.text("weight"), "weight"),
        user=row.text("user"),
    )


def _batch(text: str, column: str) -> int:
    """A batch size; empty or 0 means the training's own."""
    return cells.whole(text, column) if text else 0


def _weight(text: str, column: str) -> float:
    """An importance above 0; empty means 1."""
    return cells.positive(text, column) if text else 1.0


def _block(columns: Columns, start: int) -> RowBlock:
    submits = numbers(columns["submit_s"])
    works = numbers(columns["work_s"])
    gpus = shared(columns["gpus"], "gpus", cells.count)
    extras: tuple[Iterable[object], ...] = ()
    if any(name in columns for name in OPTIONAL):
        extras = (
            names(columns["model"]) if "model" in columns else repeat(""),
            shared(columns["batch"], "batch", _batch) if "batch" in columns else repeat(0),
            shared(columns["weight"], "weight", _weight) if "weight" in columns else repeat(1.0),
            names(columns["user"]) if "user" in columns else repeat(""),
        )
    return RowBlock(submits, columns["job"], gpus, works, extras)


CANONICAL = TraceFormat("canonical", REQUIRED, _row, OPTIONAL, block=_block)
