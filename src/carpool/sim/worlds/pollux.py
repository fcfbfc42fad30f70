"""World from Pollux's measured profiles: goodput by epoch, and a restart delay for every move."""

from __future__ import annotations

import csv
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.interpolate import LinearNDInterpolator, NearestNDInterpolator

from carpool.core.errors import CarpoolError, InputError, UnknownName
from carpool.core.estimates import Estimate, Estimator
from carpool.core.messages import ProgressReported
from carpool.core.model import Job, JobId, JobSpec
from carpool.core.topology import Cluster, Placement
from carpool.predictors.loss.goodput import BatchLimits, PolluxAgents
from carpool.sim.traces.trace import Arrival
from carpool.sim.worlds.base import Pace, TrainingSignals, World

Floats = NDArray[np.float64]
Counts = tuple[int, ...]  # devices on each node

_WHOLE = "Take the folder as it was published, with all its files."
_VALIDATION = re.compile(r"validation-(\d+)\.csv")
_COLUMNS = ("progress", "iteration", "grad_sqr", "grad_var")
_MOST_NOISE = 1e12  # samples; the scale is infinite where the mean gradient vanishes, which a journal cannot store


@dataclass(frozen=True, slots=True)
class TrainingCurve:
    """A training with one batch size, measured at the end of each epoch."""

    progress: Floats  # in steps of the reference batch
    iteration: Floats  # steps done
    grad_sqr: Floats  # squared norm of the gradient
    grad_var: Floats  # its variance at the reference batch


class StepTimes:
    """Seconds of one pass and of its synchronization, interpolated between measurements.

    Placements are normalized to the smallest rotation of their devices per node. Unmeasured ones are interpolated
    over (nodes, devices, micro-batch) of all measurements; outside, the nearest one counts.
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
    """One application as measured."""

    limits: BatchLimits
    courses: Mapping[int, TrainingCurve]  # by batch size, ascending
    times: StepTimes
    ends: Sequence[float]  # progress at the end of each epoch: the least over all batch sizes
    most_devices: int = 0  # 0: as many as the batch can be cut for
    _noises: dict[tuple[int, int], float] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def load(
        cls, folder: Path, *, epochs: int | None = None, micro_max: int | None = None, most_devices: int = 0
    ) -> Application:
        """Read ``placements.csv``, ``scalability.csv`` and ``validation-BATCH.csv``; the arguments override parts."""
        courses = _courses(folder)
        placements = _rows(folder / "placements.csv", ("placement", "local_bsz", "step_time", "sync_time"))
        names = ("num_nodes", "num_replicas", "local_bsz", "step_time", "sync_time")
        times, micros = _times(placements, _rows(folder / "scalability.csv", names))
        limits = BatchLimits(min(courses), max(courses), min(micros), micro_max or max(micros))
        num_epochs = min(len(course.progress) for course in courses.values())
        if epochs is not None and epochs > num_epochs:
            raise InputError(f"has {num_epochs} epochs, needs {epochs}", where=str(folder), way_out=_WHOLE)
        ends = [float(min(c.progress[epoch] for c in courses.values())) for epoch in range(epochs or num_epochs)]
        if not ends or ends != sorted(set(ends)) or ends[0] <= 0.0:
            raise InputError("progress does not grow from epoch to epoch", where=str(folder), way_out=_WHOLE)
        return cls(limits, courses, times, ends, most_devices)

    @property
    def widest(self) -> int:
        return self.most_devices or max(1, self.limits.largest // self.limits.micro_min)

    def epoch(self, done: float) -> int:
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


def _courses(folder: Path) -> dict[int, TrainingCurve]:
    sizes = {int(found[1]): path for path in folder.iterdir() if (found := _VALIDATION.fullmatch(path.name))}
    if not sizes:
        raise InputError("holds no validation-BATCH.csv", where=str(folder), way_out=_WHOLE)
    courses = {}
    for size in sorted(sizes):
        rows = list(_rows(sizes[size], _COLUMNS))
        table = np.array(rows, dtype=np.float64).reshape(len(rows), len(_COLUMNS))
        courses[size] = TrainingCurve(*table.T)
    return courses


def _times(placements: Iterable[Sequence[Any]], scalability: Iterable[Sequence[Any]]) -> tuple[StepTimes, list[int]]:
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


class ApplicationRules(NamedTuple):
    """Settings of the published simulator for an application."""

    epochs: int
    micro_max: int | None = None  # None: the largest measured one
    most_devices: int = 0  # 0: as many as the batch can be cut for
    batch_size: int = 0  # above 0: this batch and no other is used


# Applications that are not listed run all epochs of their profile, with any batch and number of devices.
PUBLISHED = {
    "bert": ApplicationRules(2),
    "cifar10": ApplicationRules(100),
    "deepspeech2": ApplicationRules(80),
    "imagenet": ApplicationRules(90),
    "ncf": ApplicationRules(10, most_devices=1, batch_size=32768),
    "yolov3": ApplicationRules(50, micro_max=8),
}


class PolluxStep(NamedTuple):
    """One training step."""

    batch: int  # samples, after rounding to equal passes
    seconds: float
    sync_s: float


@dataclass(slots=True)
class PolluxWorld(World):
    """Jobs progress by measured goodput (A. Qiao et al., OSDI 2021, and the published simulator's profiles).

    Work is progress in steps of the reference batch m0, the smallest that was validated; it ends with the last epoch.
    With batch b, var and sqr of the epoch's gradient, and φ = m0·var/sqr the noise scale in samples,

        rate = gain / T,   gain = (var + sqr)/(var·m0/b + sqr) = (b/m0)·(φ + m0)/(φ + b)

    T is the measured step time; each further pass of a step adds T less the synchronization. Beyond the data:

    - All device types are alike.
    - Devices beyond what the batch can be split over are idle.
    - Devices are shared by fraction, scaled down where the fractions sum past 1.
    - A change of batch size alone is free, every other change costs `standstill_s`. Crashes lose nothing.
    """

    profiles: Mapping[str, Application]
    rules: Mapping[str, ApplicationRules] = field(default_factory=lambda: PUBLISHED)
    standstill_s: float = 30.0
    report_every_s: float = 30.0
    _cluster: Cluster | None = field(default=None, repr=False)
    _steps: dict[tuple[str, Counts, int], PolluxStep] = field(default_factory=dict, repr=False)

    @classmethod
    def load(cls, folder: str | Path, *, rules: Mapping[str, ApplicationRules] = PUBLISHED) -> PolluxWorld:
        """Read a folder with one folder per application, or its parent with ``profiles``."""
        folder = Path(folder)
        inner = folder / "profiles"
        folder = inner if inner.is_dir() else folder
        way_out = "Give the folder that holds profiles/APPLICATION/placements.csv."
        if not folder.is_dir():
            raise InputError("is not a folder", where=str(folder), way_out=way_out)
        profiles = {}
        for path in sorted(folder.iterdir()):
            if (path / "placements.csv").is_file():
                rule = rules.get(path.name)
                limits = rule._asdict() if rule else {}
                limits.pop("batch_size", None)
                profiles[path.name] = Application.load(path, **limits)
        if not profiles:
            raise InputError("holds no profile of any application", where=str(folder), way_out=way_out)
        return cls(profiles, rules)

    def prepare(self, arrivals: Sequence[Arrival], cluster: Cluster) -> tuple[Sequence[Arrival], Cluster]:
        self._cluster = cluster
        return [Arrival(at, self._elastic(spec)) for at, spec in arrivals], cluster

    def work(self, spec: JobSpec) -> float:
        return self.profile(spec).ends[-1]

    def pace(self, spec: JobSpec, done: float, placement: Placement) -> Pace:
        profile = self.profile(spec)
        epoch = profile.epoch(done)
        return Pace(self.rate(spec, epoch, placement), profile.ends[epoch])

    def change_s(self, spec: JobSpec, before: Placement | None, after: Placement) -> float:
        if before is not None and before.groups == after.groups and before.batch_size != after.batch_size:
            return 0.0
        return self.standstill_s

    def signals(self, spec: JobSpec, done: float, placement: Placement) -> TrainingSignals:
        profile, step = self.profile(spec), self.step(spec, placement)
        return TrainingSignals(None, profile.noise(step.batch, profile.epoch(done)), step.seconds, step.sync_s)

    def estimator(self) -> Estimator:
        if self._cluster is None:
            raise CarpoolError("PolluxWorld.estimator is asked before PolluxWorld.prepare has named the cluster")
        return PolluxEstimator(self, self._cluster)

    def profile(self, spec: JobSpec) -> Application:
        found = self.profiles.get(spec.model)
        if found is None:
            raise UnknownName("application", spec.model, self.profiles, where=f"job {spec.id!r}")
        return found

    def step(self, spec: JobSpec, placement: Placement) -> PolluxStep:
        limits = self.profile(spec).limits
        batch = placement.batch_size or spec.batch_size or limits.reference
        counts = tuple([count for _, count in placement.groups])
        key = (spec.model, counts, batch)
        found = self._steps.get(key)
        if found is None:
            counts = _usable(counts, max(1, batch // limits.micro_min))
            micro, extra = limits.cut(batch, sum(counts))
            step_s, sync_s = self.profile(spec).times(counts, micro)
            seconds = step_s + (step_s - sync_s) * extra
            found = self._steps[key] = PolluxStep(sum(counts) * micro * (extra + 1), seconds, sync_s)
        return found

    def rate(self, spec: JobSpec, epoch: int, placement: Placement) -> float:
        profile, step = self.profile(spec), self.step(spec, placement)
        reference, noise = profile.limits.reference, profile.noise(step.batch, epoch)
        rate = step.batch / reference * (noise + reference) / (noise + step.batch) / step.seconds
        if placement.fraction != 1.0 or placement.neighbours:
            rate *= placement.fraction / max(1.0, placement.load)
        return rate

    def _elastic(self, spec: JobSpec) -> JobSpec:
        profile, rule = self.profile(spec), self.rules.get(spec.model)
        limits = profile.limits
        batches = (rule.batch_size,) * 2 if rule and rule.batch_size else (limits.reference, limits.largest)
        widest = max(profile.widest, spec.devices)
        return replace(spec, min_devices=1, max_devices=widest, batch_range=batches)


class PolluxEstimator(Estimator):
    """True rates, steps and lengths, and goodput learned from reports.

    `goodputs` answers from the job's own reports alone, as Pollux's agents do; everything else is the truth of the
    epoch the job last reported.
    """

    tunes_batches = True

    def __init__(self, world: PolluxWorld, cluster: Cluster) -> None:
        self._world = world
        self._epochs: dict[JobId, int] = {}
        self._changes = 0
        self._agents = PolluxAgents(cluster, {name: profile.limits for name, profile in world.profiles.items()})

    @property
    def version(self) -> int:
        return self._changes + self._agents.version

    def rate(self, spec: JobSpec, placement: Placement) -> Estimate:
        return Estimate(self._world.rate(spec, self._epochs.get(spec.id, 0), placement))

    def remaining(self, job: Job, at: float) -> Estimate:
        return Estimate(max(0.0, self._world.work(job.spec) - job.done_at(at)))

    def learn(self, at: float, job: Job, report: ProgressReported) -> None:
        epoch = self._world.profile(job.spec).epoch(report.done)
        if self._epochs.get(job.id, 0) != epoch:
            self._epochs[job.id] = epoch
            self._changes += 1
        self._agents.learn(at, job, report)

    def step_s(self, spec: JobSpec, placement: Placement) -> float:
        return self._world.step(spec, placement).seconds

    def move_s(self, spec: JobSpec) -> float:
        return self._world.standstill_s

    def steps_left(self, job: Job, at: float) -> float:
        """Steps after the current epoch at the job's own batch size, at least one, as the published simulator."""
        profile = self._world.profile(job.spec)
        batch = job.spec.batch_size or profile.limits.reference
        return max(1.0, profile.steps_after(batch, profile.epoch(job.done_at(at))))

    def goodputs(self, spec: JobSpec, counts: Sequence[int], several: Sequence[bool]) -> Sequence[tuple[float, int]]:
        return self._agents.goodputs(spec, counts, several)


def _usable(counts: Counts, most: int) -> Counts:
    """At most `most` of the devices, from the fullest nodes first."""
    if sum(counts) <= most:
        return counts
    kept: list[int] = []
    for count in sorted(counts, reverse=True):
        part = min(count, most - sum(kept))
        if part:
            kept.append(part)
    return tuple(sorted(kept))
