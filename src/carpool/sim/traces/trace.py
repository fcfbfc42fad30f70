"""Trace data model: arrivals, dropped rows, capacity checks, and bulk construction of job specs."""

from __future__ import annotations

import gc
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from itertools import chain, repeat
from typing import NamedTuple

from carpool.core.errors import InputError
from carpool.core.model import JobSpec, Kind

TOO_LARGE = "asks more devices than the cluster has"
LISTED_DROPS = 1000  # dropped rows that are listed one by one; the rest is only counted


class WorkUnit(StrEnum):
    """The unit of `JobSpec.work` in a trace."""

    SECONDS = "s"  # run time alone on the devices asked for
    STEPS = "steps"  # a world that knows steps per second turns them into time
    UNKNOWN = "unknown"  # the trace does not say; a world knows (Pollux: epochs by application)


class Arrival(NamedTuple):
    """A job and its submission time."""

    submit_s: float
    spec: JobSpec


class DroppedRow(NamedTuple):
    """A dropped row: its line in the file (0: not from a file), the reason, and its job if known."""

    row: int
    reason: str
    job: str = ""


@dataclass(frozen=True, slots=True)
class Trace:
    """Jobs in order of (submit_s, position in the file), and what was dropped."""

    name: str
    format: str
    arrivals: Sequence[Arrival]
    work_unit: WorkUnit = WorkUnit.SECONDS
    dropped: Mapping[str, int] = field(default_factory=dict)  # reason -> rows
    dropped_rows: Sequence[DroppedRow] = ()  # the first LISTED_DROPS of them
    # remarks on rows that were kept, such as a rounded number of GPUs -> how often
    notes: Mapping[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.arrivals)

    @property
    def num_dropped(self) -> int:
        return sum(self.dropped.values())


def check_capacity(
    trace: Trace,
    cluster_devices: int,
    by_kind: Mapping[Kind, int] | None = None,
    *,
    skip_invalid: bool = False,
) -> Trace:
    """The trace, if each job fits on the empty cluster; else an error or, with `skip_invalid`, the jobs that fit.

    With `by_kind`, a job that names kinds may use the devices of those kinds together.
    """
    specs = [spec for _, spec in trace.arrivals if spec.devices > cluster_devices or spec.kinds]
    limits = [_limit(spec, cluster_devices, by_kind) for spec in specs]
    misfits = [(spec, limit) for spec, limit in zip(specs, limits, strict=True) if spec.narrowest > limit]
    if not misfits:
        return trace
    if not skip_invalid:
        raise _does_not_fit(trace.name, *misfits[0], len(misfits), len(by_kind or ()))
    gone = {spec.id for spec, _ in misfits}
    rows = [DroppedRow(0, TOO_LARGE, spec.id) for spec, _ in misfits]
    kept = tuple([arrival for arrival in trace.arrivals if arrival.spec.id not in gone])
    if not kept:
        raise InputError(
            f"none of the {len(trace)} jobs fits on {cluster_devices} devices",
            where=trace.name,
            way_out="Use a larger --cluster.",
        )
    return replace(
        trace,
        arrivals=kept,
        dropped=dict(Counter(trace.dropped) + Counter({TOO_LARGE: len(misfits)})),
        dropped_rows=(*trace.dropped_rows, *rows)[:LISTED_DROPS],
    )


def _limit(spec: JobSpec, cluster_devices: int, by_kind: Mapping[Kind, int] | None) -> int:
    """The most devices of the empty cluster that this job may hold."""
    if by_kind is None or not spec.kinds:
        return cluster_devices
    return sum([by_kind.get(kind, 0) for kind in spec.kinds])


def _does_not_fit(name: str, spec: JobSpec, limit: int, count: int, num_kinds: int) -> InputError:
    """The error for the first job that is larger than the cluster; a job that names no kinds runs on devices of one."""
    kinds = f" of type {' or '.join(spec.kinds)}" if spec.kinds else ""
    most = f"at most {limit} of one type" if num_kinds > 1 and not spec.kinds else f"{limit}"
    others = f" ({count - 1} more jobs are too large)" if count > 1 else ""
    return InputError(
        f"job {spec.id!r} needs {spec.narrowest} devices{kinds}; the cluster has {most}{others}",
        where=name,
        way_out="Use a larger --cluster, or pass --skip-invalid to drop such jobs.",
    )


def in_seconds(trace: Trace, units_per_s: Callable[[JobSpec], float]) -> Trace:
    """The same jobs with their work as run time, given each job's rate on the devices it requests."""
    if trace.work_unit is WorkUnit.SECONDS:
        return trace
    arrivals = [Arrival(at, _timed(spec, units_per_s(spec), trace.name)) for at, spec in trace.arrivals]
    return replace(trace, arrivals=tuple(arrivals), work_unit=WorkUnit.SECONDS)


def _timed(spec: JobSpec, units_per_s: float, name: str) -> JobSpec:
    if spec.work is None:
        raise InputError(f"job {spec.id!r} has no length", where=name, way_out="Use a --world that knows it.")
    if not units_per_s > 0:
        raise InputError(
            f"job {spec.id!r} ({spec.model}, {spec.devices} devices) has a rate of {units_per_s}",
            where=name,
            way_out="Give a rate above 0 for this model and number of devices.",
        )
    return replace(spec, work=spec.work / units_per_s)


# A frozen dataclass sets its fields one by one through `object.__setattr__`: 1.5 us for one spec, of 3 us that a row
# of a trace may take. Setting field by field for a whole block through the slots themselves takes half of that.
_SETTERS = tuple([(getattr(JobSpec, entry.name).__set__, entry.default) for entry in fields(JobSpec)])


def make_specs(ids: Sequence[str], *columns: Iterable[object]) -> list[JobSpec]:
    """Specs from columns in the order of `JobSpec`'s fields; later fields have their defaults."""
    specs = list(map(object.__new__, repeat(JobSpec, len(ids))))
    given = chain([ids], columns)
    for set_field, default in _SETTERS:
        deque(map(set_field, specs, next(given, repeat(default))), maxlen=0)
    return specs


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause garbage collection: a million new objects, none of them in a cycle, would make it double the time.

    Afterwards they count as old, so that the next collection of young objects does not walk over all of them.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            if gc.get_freeze_count() == 0:  # else the caller froze objects on purpose, and they must stay frozen
                gc.freeze()
                gc.unfreeze()
            gc.enable()
