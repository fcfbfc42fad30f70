"""Row collector: turns blocks of rows into job specs, and falls back to row-by-row parsing on errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import islice
from operator import le

from carpool.core.errors import InputError
from carpool.core.model import JobSpec
from carpool.sim.traces.cells import BadCell, BadRow, Cells, UnusableRow, shown
from carpool.sim.traces.format import IrregularBlock, RowBlock, TraceFormat, TraceRow
from carpool.sim.traces.trace import LISTED_DROPS, Arrival, DroppedRow, make_specs

ROUNDED_UP = "asks for part of a GPU: counted as whole GPUs"


class Collector:
    """Collects a file's rows block by block into arrivals, and counts what was dropped."""

    def __init__(
        self,
        path: str,
        form: TraceFormat,
        places: Mapping[str, int],
        width: int,
        *,
        skip_invalid: bool = False,
        escaped: bool = False,
    ) -> None:
        self.dropped: Counter[str] = Counter()
        self.dropped_rows: list[DroppedRow] = []
        self.notes: Counter[str] = Counter()
        self._path = path
        self._form = form
        self._places = {name: place for name, place in places.items() if name in form.columns + form.optional}
        self._width = width
        self._skip_invalid = skip_invalid
        self._escaped = escaped  # the text may hold lone surrogates: check each row
        self._cells = Cells(self._places)
        self._index = 0  # rows taken so far
        self._seen: set[Hashable] = set()
        self._names: dict[str, str] = {}  # one object for each model and user
        self._submits: list[float] = []
        self._specs: list[JobSpec] = []
        self._parts: list[TraceRow] = []  # rows that are still to be joined into jobs

    def take(self, rows: Sequence[list[str]], first_line: int, num_lines: int) -> None:
        """Add consecutive rows; `num_lines` exceeds their number when a quoted cell holds a line end."""
        block = self._block(rows) if num_lines == len(rows) else None
        if block is not None:
            self._submits.extend(block.submits)
            self._specs.extend(make_specs(block.ids, block.gpus, block.works, *block.extras))
            self._index += len(rows)
            return
        line = first_line
        for fields in rows:
            height = 1 if num_lines == len(rows) else 1 + sum(map(_line_ends, fields))
            if len(fields) > 1 or (fields and fields[0].strip()):  # else a blank line
                self._take_row(fields, line, height)
                self._index += 1
            line += height

    def _block(self, rows: Sequence[list[str]]) -> RowBlock | None:
        """The rows as clean columns, or None if one of them needs the row-by-row reader."""
        form = self._form
        if form.block is None or self._escaped:
            return None
        try:
            columns = list(zip(*rows, strict=True))
        except ValueError:  # rows of different lengths
            return None
        if len(columns) != self._width:
            return None
        try:
            block = form.block({name: columns[place] for name, place in self._places.items()}, self._index)
        except (IrregularBlock, BadRow):
            return None
        return None if form.has_own_ids and not self._are_new(block.ids) else block

    def _are_new(self, ids: Sequence[str]) -> bool:
        """Whether all ids are present, distinct and new; then they count as seen."""
        new: set[Hashable] = set(ids)
        if len(new) != len(ids) or "" in new or not self._seen.isdisjoint(new):
            return False
        self._seen |= new
        return True

    def _take_row(self, fields: list[str], line: int, height: int) -> None:
        try:
            row = self._checked(fields, height)
        except UnusableRow as unusable:
            self._drop(line, 1, unusable.reason)
        except BadRow as bad:
            if not self._skip_invalid:
                raise self._error(line, bad) from None
            self._drop(line, height, bad.reason)
        else:
            if self._form.regroup is not None:
                self._parts.append(row)
            else:
                self._keep(row)

    def _checked(self, fields: list[str], height: int) -> TraceRow:
        self._check_shape(fields, height)
        cells = self._cells
        cells.fields, cells.index = fields, self._index
        row = self._form.row(cells)
        if self._form.has_own_ids:
            if row.key in self._seen:
                raise BadCell(self._form.columns[0], row.id, "is the id of an earlier row too")
            self._seen.add(row.key)
        return row

    def _check_shape(self, fields: list[str], height: int) -> None:
        if height > 1:
            raise BadRow(f"a quoted cell runs over {height} lines, from {shown(fields[0])}", "a quoted cell runs on")
        if len(fields) < self._width:
            problem = f"the row {shown(self._form.delimiter.join(fields))} has {len(fields)} of {self._width} cells"
            raise BadRow(f"{problem}; the file may be cut short", "too few cells")
        if len(fields) > self._width:
            problem = f"the row {shown(self._form.delimiter.join(fields))} has {len(fields)} cells"
            raise BadRow(f"{problem}; the header has {self._width}", "too many cells")
        if self._escaped and not _is_clean(fields):
            raise BadRow("the row is not UTF-8", "not UTF-8")

    def _keep(self, row: TraceRow) -> None:
        if row.devices != row.gpus:
            self.notes[ROUNDED_UP] += 1
        share = self._names.setdefault
        row = row._replace(model=share(row.model, row.model), user=share(row.user, row.user))
        self._submits.append(row.submit_s)
        self._specs.append(row.spec())

    def _drop(self, line: int, height: int, reason: str) -> None:
        self.dropped[reason] += height
        room = LISTED_DROPS - len(self.dropped_rows)
        self.dropped_rows.extend(islice((DroppedRow(line + offset, reason) for offset in range(height)), room))

    def _error(self, line: int, bad: BadRow) -> InputError:
        column = f", column {bad.column!r}" if bad.column else ""
        return InputError(
            bad.problem,
            where=f"{self._path}, row {line}{column}",
            way_out="Correct the row, or pass --skip-invalid to drop such rows.",
        )

    def arrivals(self, max_jobs: int | None = None) -> tuple[Arrival, ...]:
        """All jobs in order of submission, the file's order on ties."""
        if self._form.regroup is not None:
            for row in self._form.regroup(self._parts):
                self._keep(row)
            self._parts.clear()
        if not self._specs:
            raise self._empty()
        submits, specs = self._submits, self._specs
        if not all(map(le, submits, islice(submits, 1, None))):
            order = sorted(range(len(submits)), key=submits.__getitem__)
            submits, specs = [submits[place] for place in order], [specs[place] for place in order]
        if max_jobs is not None and len(submits) > max_jobs:
            self.dropped[f"after the first {max_jobs} jobs"] += len(submits) - max_jobs
            submits, specs = submits[:max_jobs], specs[:max_jobs]
        if self._form.from_earliest:
            submits = [at - submits[0] for at in submits]
        return tuple(map(Arrival, submits, specs))

    def _empty(self) -> InputError:
        if not self.dropped:
            return InputError("the trace has no rows", where=self._path, way_out="Give a file with at least one job.")
        reasons = ", ".join([f"{reason}: {rows}" for reason, rows in self.dropped.most_common(5)])
        return InputError(
            f"no row is left; all {sum(self.dropped.values())} were dropped ({reasons})",
            where=self._path,
            way_out="Check the format, or give a file with at least one usable job.",
        )


def _line_ends(cell: str) -> int:
    """Line ends inside a cell, as the file's lines are counted."""
    return cell.count("\n") + cell.count("\r") - cell.count("\r\n")


def _is_clean(fields: Iterable[str]) -> bool:
    try:
        "".join(fields).encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
