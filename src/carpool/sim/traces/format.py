"""Trace format interface: the columns of a format, its row parser, and fast parsers of whole columns."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple, TypeVar

from carpool.core.model import JobId, JobSpec, Kind
from carpool.sim.traces.cells import Cells
from carpool.sim.traces.trace import WorkUnit


class TraceRow(NamedTuple):
    """One usable row, as job fields."""

    submit_s: float
    id: str
    gpus: float  # a fraction of a GPU is rounded up when the job is made
    work: float | None
    model: str = ""
    batch: int = 0
    weight: float = 1.0
    user: str = ""
    kinds: tuple[Kind, ...] = ()
    part: str = ""  # of the job, where a job has several rows

    @property
    def key(self) -> Hashable:
        return (self.id, self.part) if self.part else self.id

    @property
    def devices(self) -> int:
        return max(1, math.ceil(self.gpus - 1e-9))

    def spec(self) -> JobSpec:
        return JobSpec(
            JobId(self.id), self.devices, self.work, self.model, self.batch, self.weight, self.user, kinds=self.kinds
        )


class RowBlock(NamedTuple):
    """Clean rows as columns; `extras` are model, batch size, weight and user, where present."""

    submits: Sequence[float]
    ids: Sequence[str]
    gpus: Sequence[int]
    works: Sequence[float]
    extras: tuple[Iterable[object], ...] = ()


Columns = Mapping[str, Sequence[str]]


@dataclass(frozen=True, slots=True)
class TraceFormat:
    """One public trace format.

    `row` reads one row and checks everything: it raises `BadRow` for an invalid row and `UnusableRow` for one that the
    format itself marks unusable. `block`, if given, reads many rows fast; if it raises `IrregularBlock` or `BadRow`,
    these rows are read again one by one with `row`.
    """

    name: str
    # that every file must have, the id first; a file without a header has exactly these, in this order
    columns: tuple[str, ...]
    row: Callable[[Cells], TraceRow]
    optional: tuple[str, ...] = ()  # columns that are read when present
    ignored: tuple[str, ...] = ()  # columns of the public files that a scheduler has no use for
    block: Callable[[Columns, int], RowBlock] | None = None
    delimiter: str = ","
    has_own_ids: bool = True  # else the row's index is the job's id
    headerless: Callable[[Sequence[str]], bool] | None = None  # whether a first row is data of this format
    regroup: Callable[[Iterable[TraceRow]], list[TraceRow]] | None = None  # joins the rows of one job
    work_unit: WorkUnit = WorkUnit.SECONDS
    from_earliest: bool = False  # times are dates or have an offset: count from the earliest kept row

    @property
    def header(self) -> str:
        if self.headerless and self.delimiter == "\t":
            return f"no header, {len(self.columns)} columns between tabs: {', '.join(self.columns)}"
        shown = ",".join(self.columns) + (f"[,{','.join(self.optional)}]" if self.optional else "")
        return f"{shown} (header or not)" if self.headerless else shown


class IrregularBlock(Exception):
    """A block that needs the row-by-row reader."""


Value = TypeVar("Value")
_EPOCH = datetime(1970, 1, 1)  # noqa: DTZ001 - the traces' dates have no zone


def numbers(texts: Sequence[str]) -> list[float]:
    """Finite numbers of 0 or more."""
    try:
        values = list(map(float, texts))
    except ValueError as error:
        raise IrregularBlock from error
    # A sum is finite only if each value is; if the sum overflows, the rows are merely read again one by one.
    if not (min(values) >= 0 and math.isfinite(sum(values))):
        raise IrregularBlock
    return values


def stamps(texts: Sequence[str]) -> list[float]:
    """Dates without a zone as seconds since 1970."""
    try:
        return [(at - _EPOCH).total_seconds() for at in map(datetime.fromisoformat, texts)]
    except (ValueError, TypeError) as error:  # TypeError: a date with a zone
        raise IrregularBlock from error


def shared(texts: Sequence[str], column: str, parse: Callable[[str, str], Value]) -> list[Value]:
    """Values of a column with few distinct ones: each is parsed once and shared."""
    values = {text: parse(text, column) for text in set(texts)}
    return list(map(values.__getitem__, texts))


def names(texts: Sequence[str]) -> list[str]:
    """Repeated names, one object for all equal cells."""
    first: dict[str, str] = {}
    return list(map(first.setdefault, texts, texts))


def row_ids(start: int, num_rows: int) -> list[str]:
    """Ids for rows that have none: their index in the file."""
    return list(map(str, range(start, start + num_rows)))
