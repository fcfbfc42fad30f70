"""Trace writer: atomic canonical CSV files, and conversion from other formats."""

from __future__ import annotations

import csv
import gzip
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from io import TextIOWrapper
from operator import attrgetter
from pathlib import Path
from typing import TextIO

from carpool.core.errors import InputError, cause
from carpool.core.model import JobSpec
from carpool.sim.traces.canonical import REQUIRED, UNKNOWN_WORK
from carpool.sim.traces.cells import shown
from carpool.sim.traces.reader import read_trace
from carpool.sim.traces.trace import Trace, WorkUnit

_EXTRAS = {"model": "model", "batch": "batch_size", "weight": "weight", "user": "user"}  # column -> field of JobSpec
_CARRIED = {"id", "devices", "work", *_EXTRAS.values()}
_LOST = tuple([entry.name for entry in fields(JobSpec) if entry.name not in _CARRIED])
_DEFAULTS = {entry.name: entry.default for entry in fields(JobSpec)}


@dataclass(frozen=True, slots=True)
class WriteSummary:
    """What was written, and which job fields the CSV has no column for."""

    path: Path
    jobs: int
    lost: dict[str, int] = field(default_factory=dict)


def write_trace(trace: Trace, path: str | Path) -> WriteSummary:
    """Write a trace as canonical CSV (gzip when the name ends in .gz); a failure leaves no partial file.

    Optional columns are written when some job needs them. Numbers are written so that reading gives the same ones.
    """
    path = Path(path)
    if trace.work_unit is WorkUnit.STEPS:
        raise InputError(
            "its work is counted in steps, canonical CSV in seconds",
            where=trace.name,
            way_out="Give each job's steps per second (`in_seconds`), or replay the file as it is with --world.",
        )
    specs = [arrival.spec for arrival in trace.arrivals]
    extras = [name for name, of in _EXTRAS.items() if any(getattr(spec, of) != _DEFAULTS[of] for spec in specs)]
    with atomic_writer(path) as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*REQUIRED, *extras])
        writer.writerows(_lines(trace, extras))
    return WriteSummary(path, len(specs), _lost(specs))


def convert(source: str | Path, target: str | Path, format: str | None = None, *, skip_invalid: bool = False) -> Trace:  # noqa: A002
    """Read a trace in any known format and write it as canonical CSV; returns the trace."""
    trace = read_trace(source, format, skip_invalid=skip_invalid)
    write_trace(trace, target)
    return trace


def _lines(trace: Trace, extras: Sequence[str]) -> Iterator[list[object]]:
    picks = [attrgetter(_EXTRAS[name]) for name in extras]
    for submit_s, spec in trace.arrivals:
        if not spec.id or not spec.id.isprintable() or not (spec.model + spec.user).isprintable():
            _refuse_unwritable(spec, trace.name)
        work = UNKNOWN_WORK if spec.work is None else _number(spec.work)
        cells: list[object] = [spec.id, _number(submit_s), spec.devices, work]
        for pick in picks:
            value = pick(spec)
            cells.append(_number(value) if isinstance(value, float) else value)
        yield cells


def _number(value: float) -> str:
    """A number in the shortest form that reads back equal."""
    return repr(float(value)).removesuffix(".0")


def _refuse_unwritable(spec: JobSpec, name: str) -> None:
    if not spec.id:
        raise InputError("a job has the empty name", where=name, way_out="Name it.")
    for text in (spec.id, spec.model, spec.user):
        if "\n" in text or "\r" in text or any("\ud800" <= letter <= "\udfff" for letter in text):
            raise InputError(
                f"the name {shown(text)} of job {shown(spec.id)} has a line end or is not Unicode",
                where=name,
                way_out="Rename it.",
            )


def _lost(specs: Sequence[JobSpec]) -> dict[str, int]:
    """Fields of some jobs that the CSV cannot hold."""
    pick = attrgetter(*_LOST)
    plain = tuple([_DEFAULTS[name] for name in _LOST])
    unusual = [values for values in map(pick, specs) if values != plain]
    counts = {name: sum([values[place] != plain[place] for values in unusual]) for place, name in enumerate(_LOST)}
    return {name: count for name, count in counts.items() if count}


@contextmanager
def atomic_writer(path: Path) -> Iterator[TextIO]:
    """A text file that replaces `path` only once fully written."""
    path = path.resolve()  # a link stays a link
    if path.exists() and not path.is_file():
        raise InputError("is not a regular file, so it cannot be replaced", where=str(path), way_out="Name a file.")
    draft = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with _open_draft(draft, packed=path.suffix == ".gz") as file:
            yield file
        draft.replace(path)
    except OSError as error:
        raise InputError(
            f"cannot be written ({cause(error)})", where=str(path), way_out="Check the folder and the disk."
        ) from error
    finally:
        with suppress(FileNotFoundError):
            draft.unlink()


@contextmanager
def _open_draft(draft: Path, *, packed: bool) -> Iterator[TextIO]:
    """The draft as text, synced when closed; without a time stamp, so that equal traces give equal files."""
    with draft.open("xb") as raw:
        if packed:
            with (
                gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as pack,
                TextIOWrapper(pack, "utf-8", newline="") as text,
            ):
                yield text
        else:
            plain = TextIOWrapper(raw, "utf-8", newline="")
            yield plain
            plain.flush()
            plain.detach()
        raw.flush()
        os.fsync(raw.fileno())
