"""Measured profiles of one application: step times by placement and batch, progress and gradient noise by epoch."""

from __future__ import annotations

import csv
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.interpolate import LinearNDInterpolator, NearestNDInterpolator

from carpool.core.errors import InputError
from carpool.predictors.goodput import BatchLimits

Floats = NDArray[np.float64]
Counts = tuple[int, ...]  # devices on each node

_WHOLE = "Take the folder as it was published, with all its files."
_VALIDATION = re.compile(r"validation-(\d+)\.csv")
_COLUMNS = ("progress", "iteration", "grad_sqr", "grad_var")
_MOST_NOISE = 1e12  # samples; where the mean gradient vanishes the scale is infinite, which no journal can hold


@dataclass(frozen=True, slots=True)
class Course:
    """A training with one batch size, measured at the end of each epoch."""

    progress: Floats  # in steps of the reference batch
    iteration: Floats  # steps done
    grad_sqr: Floats  # squared norm of the gradient
    grad_var: Floats  # its variance at the reference batch


class StepTimes:
    """Seconds of one pass and of its synchronisation, between measured points by linear interpolation.

    Placements are known by the smallest rotation of their devices per node. Those that were not measured are
    interpolated over (nodes, devices, micro-batch) of all measurements; outside of them the nearest one counts.
    """

    def __init__(self, measured: Mapping[Counts, Floats], scattered: Floats) -> None:
        self._measured = measured  # rows of micro-batch, step_s, sync_s
        self._scattered = scattered  # rows of nodes, devices, micro-batch, step_s, sync_s
        self._between: LinearNDInterpolator | None = None  # made when it is first needed: triangulation is slow
        self._known: dict[tuple[Counts, int], tuple[float, float]] = {}

    def __call__(self, counts: Counts, micro: int) -> tuple[float, float]:
        """(step_s, sync_s) of one pass over `micro` samples on each device."""
        key = (counts, micro)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._look_up(counts, micro)
        return found

    def _look_up(self, counts: Counts, micro: int) -> tuple[float, float]:
        rotations = [counts[turn:] + counts[:turn] for turn in range(len(counts))]
        rows = self._measured.get(min(rotations))
        if rows is not None:
            step_s, sync_s = (float(np.interp(micro, rows[:, 0], rows[:, column])) for column in (1, 2))
            return step_s, sync_s
        points, values = self._scattered[:, :3], self._scattered[:, 3:]
        if self._between is None:
            self._between = LinearNDInterpolator(points, values)
        spot = [min(float(len(counts)), points[:, 0].max()), float(sum(counts)), float(micro)]
        answer = np.asarray(self._between([spot]))[0]
        if np.isnan(answer).any():
            answer = np.asarray(NearestNDInterpolator(points, values, rescale=True)([spot]))[0]
        return float(answer[0]), float(answer[1])


@dataclass(frozen=True, slots=True)
class Application:
    """One application as it was measured."""

    limits: BatchLimits
    courses: Mapping[int, Course]  # by batch size, ascending
    times: StepTimes
    ends: Sequence[float]  # progress at the end of each epoch: the least over all batch sizes
    most_devices: int = 0  # 0: as many as the batch can be cut for
    _noises: dict[tuple[int, int], float] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def load(
        cls, folder: Path, *, epochs: int | None = None, micro_max: int | None = None, most_devices: int = 0
    ) -> Application:
        """Read ``placements.csv``, ``scalability.csv`` and ``validation-BATCH.csv``; some of it may be overruled."""
        courses = _courses(folder)
        placements = _rows(folder / "placements.csv", ("placement", "local_bsz", "step_time", "sync_time"))
        names = ("num_nodes", "num_replicas", "local_bsz", "step_time", "sync_time")
        times, micros = _times(placements, _rows(folder / "scalability.csv", names))
        limits = BatchLimits(min(courses), max(courses), min(micros), micro_max or max(micros))
        num_epochs = min(len(course.progress) for course in courses.values())
        if epochs is not None and epochs > num_epochs:
            raise InputError(f"has {num_epochs} epochs, {epochs} are needed", where=str(folder), way_out=_WHOLE)
        ends = [float(min(c.progress[epoch] for c in courses.values())) for epoch in range(epochs or num_epochs)]
        if not ends or ends != sorted(set(ends)) or ends[0] <= 0.0:
            raise InputError("progress does not grow from epoch to epoch", where=str(folder), way_out=_WHOLE)
        return cls(limits, courses, times, ends, most_devices)

    @property
    def widest(self) -> int:
        """Most devices that a step can be cut for."""
        return self.most_devices or max(1, self.limits.largest // self.limits.micro_min)

    def epoch(self, done: float) -> int:
        """The epoch that a job with so much progress is in."""
        return min(bisect_right(self.ends, done), len(self.ends) - 1)

    def noise(self, batch: int, epoch: int) -> float:
        """Gradient noise scale in samples: reference batch × variance / squared norm."""
        key = (batch, epoch)
        found = self._noises.get(key)
        if found is None:
            sqr, var = self._at("grad_sqr", batch, epoch), self._at("grad_var", batch, epoch)
            scale = self.limits.reference * var
            found = min(_MOST_NOISE, scale / sqr) if sqr > 0.0 else _MOST_NOISE
            self._noises[key] = found
        return found

    def steps_after(self, batch: int, epoch: int) -> float:
        """Steps of the epochs after this one."""
        return self._at("iteration", batch, len(self.ends) - 1) - self._at("iteration", batch, epoch)

    def _at(self, column: str, batch: int, epoch: int) -> float:
        """A measured column, linear between the two nearest batch sizes."""
        sizes = list(self.courses)
        place = bisect_left(sizes, batch)
        high = sizes[min(place, len(sizes) - 1)]
        low = high if high <= batch else sizes[max(place - 1, 0)]
        part = (batch - low) / (high - low) if high > low and batch > low else 0.0
        ends = [float(getattr(self.courses[size], column)[epoch]) for size in (low, high)]
        return ends[0] + part * (ends[1] - ends[0])


def _courses(folder: Path) -> dict[int, Course]:
    sizes = {int(found[1]): path for path in folder.iterdir() if (found := _VALIDATION.fullmatch(path.name))}
    if not sizes:
        raise InputError("holds no validation-BATCH.csv", where=str(folder), way_out=_WHOLE)
    courses = {}
    for size in sorted(sizes):
        rows = list(_rows(sizes[size], _COLUMNS))
        table = np.array(rows, dtype=np.float64).reshape(len(rows), len(_COLUMNS))
        courses[size] = Course(*table.T)
    return courses


def _times(placements: Iterable[Sequence[Any]], scalability: Iterable[Sequence[Any]]) -> tuple[StepTimes, list[int]]:
    """Step times, and the micro-batches measured."""
    by_placement: dict[Counts, list[list[float]]] = {}
    alike: dict[tuple[int, int, int], list[tuple[float, float]]] = {}
    for name, micro, step_s, sync_s in placements:
        counts = tuple(int(digit) for digit in str(int(name)))
        by_placement.setdefault(counts, []).append([micro, step_s, sync_s])
        alike.setdefault((len(counts), sum(counts), int(micro)), []).append((step_s, sync_s))
    scattered = [[*shape, *np.mean(alike[shape], axis=0)] for shape in sorted(alike)]
    scattered += [list(row) for row in scalability]
    measured = {counts: np.array(sorted(rows)) for counts, rows in by_placement.items()}
    return StepTimes(measured, np.array(scattered, dtype=np.float64)), [micro for _, _, micro in alike]


def _rows(path: Path, names: Sequence[str]) -> Iterable[list[float]]:
    """The named columns of a CSV file as numbers, row by row."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            missing = [name for name in names if name not in (reader.fieldnames or ())]
            if missing:
                raise InputError(f"has no column {missing[0]!r}", where=str(path), way_out=_WHOLE)
            for row in reader:
                yield [_number(row[name], f"{path}, line {reader.line_num}, {name}") for name in names]
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", where=str(path), way_out=_WHOLE) from None


def _number(text: str | None, where: str) -> float:
    try:
        return float(text or "")
    except ValueError:
        raise InputError(f"{text!r} is not a number", where=where) from None
