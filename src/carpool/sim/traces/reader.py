"""Trace reader: opens plain or gzip files, detects the format, and accounts for dropped rows."""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import TextIOWrapper
from itertools import chain, islice
from pathlib import Path
from typing import BinaryIO, cast

from carpool.core.errors import InputError, UnknownName, cause
from carpool.sim.traces.canonical import CANONICAL
from carpool.sim.traces.cells import shown
from carpool.sim.traces.format import TraceFormat
from carpool.sim.traces.public_formats import (
    GAVEL,
    HELIOS,
    PAI_JOBS,
    PAI_TASKS,
    PHILLY_DATED,
    PHILLY_TIMED,
    PODS_2023,
    POLLUX,
)
from carpool.sim.traces.row_collector import Collector
from carpool.sim.traces.trace import Trace, gc_paused

_GZIP_MAGIC = b"\x1f\x8b"
FIRST_LINE_CHARS = 65_536  # a longer first line is not a header


@contextmanager
def _open_bytes(path: Path) -> Iterator[BinaryIO]:
    """The file's bytes, unpacked if gzip, whatever the name."""
    with path.open("rb") as raw:
        if raw.peek(2)[:2] == _GZIP_MAGIC:
            with gzip.GzipFile(fileobj=raw) as unpacked:
                yield cast(BinaryIO, unpacked)
        else:
            yield raw


@contextmanager
def open_text(path: Path, *, escape: bool = False) -> Iterator[io.TextIOWrapper]:
    """The file's text, line ends untouched; with `escape`, invalid UTF-8 becomes lone surrogates."""
    try:
        with _open_bytes(path) as raw:
            errors = "surrogateescape" if escape else "strict"
            with io.TextIOWrapper(raw, encoding="utf-8-sig", errors=errors, newline="") as text:
                yield text
    except OSError as error:
        raise _cannot_open(path, error) from error
    except (EOFError, zlib.error) as error:
        raise InputError(
            f"the gzip data is damaged or cut short ({error})", where=str(path), way_out="Fetch the file again."
        ) from error
    except csv.Error as error:
        raise InputError(f"is not CSV ({error})", where=str(path), way_out="Look for an unclosed quote.") from error


def _cannot_open(path: Path, error: OSError) -> InputError:
    where = str(path)
    if isinstance(error, FileNotFoundError):
        return InputError("does not exist", where=where, way_out="Check the path.")
    if isinstance(error, IsADirectoryError):
        return InputError("is a folder, not a file", where=where, way_out="Name one trace file in it.")
    if isinstance(error, gzip.BadGzipFile):
        return InputError(f"the gzip data is damaged ({error})", where=where, way_out="Fetch the file again.")
    return InputError(f"cannot be read ({cause(error)})", where=where, way_out="Check its permissions.")


def not_utf8(path: Path) -> InputError:
    """The error for invalid UTF-8: it names the first such row."""
    with _open_bytes(path) as raw:
        for line, content in enumerate(raw, start=1):
            try:
                content.decode("utf-8")
            except UnicodeDecodeError as error:
                value = shown(content.strip().decode("utf-8", "backslashreplace"))
                return InputError(
                    f"byte 0x{content[error.start]:02x} in {value} is not UTF-8",
                    where=f"{path}, row {line}",
                    way_out="Save the file as UTF-8, or pass --skip-invalid to drop such rows.",
                )
    return InputError("the text is not UTF-8", where=str(path), way_out="Save the file as UTF-8.")


def ends_mid_line(path: Path) -> bool:
    """Whether a plain file's last line has no line end."""
    if not path.is_file():
        return False
    with path.open("rb") as raw:
        if raw.peek(2)[:2] == _GZIP_MAGIC:
            return False
        raw.seek(-1, io.SEEK_END)
        return raw.read(1) not in (b"\n", b"\r")


FORMATS: dict[str, tuple[TraceFormat, ...]] = {  # name -> the forms its files come in
    "canonical": (CANONICAL,),
    "philly": (PHILLY_DATED, PHILLY_TIMED),
    "helios": (HELIOS,),
    "alibaba-2020": (PAI_TASKS, PAI_JOBS),
    "alibaba-2023": (PODS_2023,),
    "gavel": (GAVEL,),
    "pollux": (POLLUX,),
}
BLOCK_ROWS = 4096  # rows that are converted together
MAYBE_CUT = "the last line has no line end: the file may be cut short"


@dataclass(frozen=True, slots=True)
class _Layout:
    format: TraceFormat
    header: tuple[str, ...]
    first: str
    skipped_lines: int  # before the data
    is_headerless: bool
    delimiter: str

    @property
    def places(self) -> dict[str, int]:
        return {name: place for place, name in enumerate(self.header)}


def read_trace(
    path: str | Path,
    format: str | None = None,  # noqa: A002
    *,
    skip_invalid: bool = False,
    max_jobs: int | None = None,
) -> Trace:
    """Read a trace file, plain or gzip; its format is recognised from its first line unless it is named.

    A bad row is an `InputError` with file, row, column and value; with `skip_invalid` it is dropped, counted and listed
    instead. `max_jobs` keeps the first ones. `check_capacity` checks whether the jobs fit a cluster.
    """
    path = Path(path)
    try:
        return _read(path, format, skip_invalid, max_jobs, escape=False)
    except UnicodeDecodeError:
        if not skip_invalid:
            raise not_utf8(path) from None
        return _read(path, format, skip_invalid, max_jobs, escape=True)


def detect(path: str | Path) -> str:
    """The name of a file's format."""
    path = Path(path)
    try:
        with open_text(path) as text:
            return _layout(path, text, None).format.name
    except UnicodeDecodeError:
        raise not_utf8(path) from None


def _read(
    path: Path,
    named: str | None,
    skip_invalid: bool,
    max_jobs: int | None,
    *,
    escape: bool,
) -> Trace:
    with gc_paused(), open_text(path, escape=escape) as text:
        layout = _layout(path, text, named)
        jobs = Collector(
            str(path),
            layout.format,
            layout.places,
            len(layout.header),
            skip_invalid=skip_invalid,
            escaped=escape,
        )
        _take_all(jobs, layout, text)
        arrivals = jobs.arrivals(max_jobs)
    notes = jobs.notes + Counter({f"column {name!r} is not used": 1 for name in _unused(layout)})
    if ends_mid_line(path):
        notes[MAYBE_CUT] += 1
    form = layout.format
    return Trace(
        str(path), form.name, arrivals, form.work_unit, dict(jobs.dropped), tuple(jobs.dropped_rows), dict(notes)
    )


def _take_all(jobs: Collector, layout: _Layout, text: TextIOWrapper) -> None:
    lines = chain([layout.first], text) if layout.is_headerless else text
    if layout.delimiter == "\t":
        rows = csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
    else:
        rows = csv.reader(lines, delimiter=layout.delimiter)
    line = layout.skipped_lines + 1
    while block := list(islice(rows, BLOCK_ROWS)):
        num_lines = layout.skipped_lines + 1 + rows.line_num - line
        jobs.take(block, line, num_lines)
        line += num_lines


def _unused(layout: _Layout) -> list[str]:
    known = {*layout.format.columns, *layout.format.optional, *layout.format.ignored}
    return [name for name in layout.header if name not in known]


def _layout(path: Path, text: TextIOWrapper, named: str | None) -> _Layout:
    """Determine the layout from the first line that is not blank."""
    if named is not None and named not in FORMATS:
        raise UnknownName("trace format", named, FORMATS)
    first, skipped = text.readline(FIRST_LINE_CHARS), 0
    while first and not first.strip():
        first, skipped = text.readline(FIRST_LINE_CHARS), skipped + 1
    if not first:
        raise InputError("the file is empty", where=str(path), way_out="Give a file with at least one job.")
    forms = FORMATS[named] if named is not None else tuple(chain.from_iterable(FORMATS.values()))
    for form in forms:
        delimiter = _delimiter(first) if form.delimiter == "," else form.delimiter
        cells = _cells(first, delimiter)
        header = tuple([cell.strip() for cell in cells])
        if set(form.columns) <= set(header):
            _refuse_twins(path, header, skipped + 1)
            return _Layout(form, header, first, skipped + 1, is_headerless=False, delimiter=delimiter)
        if form.headerless is not None and form.headerless(cells):
            return _Layout(form, form.columns, first, skipped, is_headerless=True, delimiter=delimiter)
    raise _unknown_header(path, first, skipped + 1, named, forms)


def _cells(line: str, delimiter: str) -> list[str]:
    if delimiter == "\t":
        return line.rstrip("\r\n").split("\t")
    return next(csv.reader([line], delimiter=delimiter), [])


def _delimiter(first: str) -> str:
    """What separates the cells of a CSV file; spreadsheets of some languages write semicolons."""
    return max(",;", key=lambda delimiter: len(_cells(first, delimiter)))


def _refuse_twins(path: Path, header: Sequence[str], line: int) -> None:
    name, times = Counter(header).most_common(1)[0]
    if times > 1:
        raise InputError(
            f"the header names column {name!r} {times} times",
            where=f"{path}, row {line}",
            way_out="Rename one of them.",
        )


def _unknown_header(path: Path, first: str, line: int, named: str | None, forms: Sequence[TraceFormat]) -> InputError:
    line_text = shown(first.strip())
    found = {cell.strip() for cell in _cells(first, _delimiter(first))}
    nearest = max(forms, key=lambda form: len(found & set(form.columns)) / len(form.columns))
    missing = [name for name in nearest.columns if name not in found]
    if named is not None:
        problem = f"the header {line_text} lacks {_columns(missing)} of format {named}"
        expected = " or ".join([form.header for form in forms])
        return InputError(problem, where=f"{path}, row {line}", way_out=f"Expected: {expected}.")
    problem = f"the header {line_text} matches no known format"
    if len(missing) < len(nearest.columns):
        problem += f"; for {nearest.name} it lacks {_columns(missing)}"
    known = "; ".join([f"{form.name}: {form.header}" for form in forms])
    return InputError(problem, where=f"{path}, row {line}", way_out=f"Known formats: {known}.")


def _columns(names: Sequence[str]) -> str:
    return f"column{'s' if len(names) > 1 else ''} {', '.join([repr(name) for name in names])}"
