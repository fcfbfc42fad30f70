"""What a trace format is: the columns it is known by, and how one of its rows becomes a job."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from carpool.core.model import JobId, JobSpec, Kind
from carpool.sim.traces.cells import Cells
from carpool.sim.traces.trace import WorkUnit


class TraceRow(NamedTuple):
    """One usable row, in our words."""

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
        """What no two rows of a file may share."""
        return (self.id, self.part) if self.part else self.id

    @property
    def devices(self) -> int:
        """Whole devices it takes."""
        return max(1, math.ceil(self.gpus - 1e-9))

    def spec(self) -> JobSpec:
        """The job it asks for."""
        return JobSpec(
            JobId(self.id), self.devices, self.work, self.model, self.batch, self.weight, self.user, kinds=self.kinds
        )


class RowBlock(NamedTuple):
    """Many clean rows at once, as columns; `extras` are model, batch size, weight and user, as far as there are any."""

    submits: Sequence[float]
    ids: Sequence[str]
    gpus: Sequence[int]
    works: Sequence[float]
    extras: tuple[Iterable[object], ...] = ()


Columns = Mapping[str, Sequence[str]]


@dataclass(frozen=True, slots=True)
class Format:
    """One public way to write a trace down.

    `row` reads one row with care: it raises `BadRow` for a fault and `Unusable` for what the format itself rules out.
    `block`, where there is one, reads many rows fast and raises `Strange` or `BadRow` for anything odd: then `row` has
    its turn.
    """

    name: str
    columns: tuple[str, ...]  # that a file must have, its id first; all of them, in order, where there is no header
    row: Callable[[Cells], TraceRow]
    optional: tuple[str, ...] = ()  # columns that are read when present
    ignored: tuple[str, ...] = ()  # columns of the public files that a scheduler has no use for
    block: Callable[[Columns, int], RowBlock] | None = None
    delimiter: str = ","
    has_own_ids: bool = True  # else the row's index is the job's id
    headerless: Callable[[Sequence[str]], bool] | None = None  # tells whether a first row is data of this format
    regroup: Callable[[Iterable[TraceRow]], list[TraceRow]] | None = None  # joins the rows of one job
    work_unit: WorkUnit = WorkUnit.SECONDS
    from_earliest: bool = False  # times are dates or have an offset: count from the earliest kept row

    @property
    def header(self) -> str:
        """The columns as they are shown to people."""
        if self.headerless and self.delimiter == "\t":
            return f"no header, {len(self.columns)} columns between tabs: {', '.join(self.columns)}"
        shown = ",".join(self.columns) + (f"[,{','.join(self.optional)}]" if self.optional else "")
        return f"{shown} (header or not)" if self.headerless else shown


class Strange(Exception):
    """Something in a block needs the careful reader."""
