"""Lane plan: the shares of a device's tasks on the lanes of its GPU, or turns, from what its cycles measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from carpool.core.estimates import DeclaredEstimator, Estimate, MixEntry
from carpool.core.model import JobId, JobSpec, Kind
from carpool.federated.federation import TaskName
from carpool.federated.messages import Work
from carpool.policies.sharing.share_search import Setting, ShareSearch, Tenant
from carpool.predictors.sharing.retention import Observed, RetentionModel, Sharer, Traits, shipped_prior

_LEAST = 1e-9
_NEW_PART = 0.5  # of a measurement in the running mean
_IN_COMPANY = (
    0.8  # least part of its time that a task shared with all others, for its speed to count as that of the mix
)
_LEAST_GAIN = 0.05  # relative, below which measurements differ anyway

Shares = tuple[float, ...]


class LaneTask(NamedTuple):
    """A task as the plan of a device with lanes sees it."""

    name: TaskName
    batch_size: int
    sample_s: float  # alone on the whole GPU
    epoch_s: float  # likewise
    share: float  # of the lane that it has
    load_s: float  # to give it another


class LaneChoice(NamedTuple):
    """Shares of a device's tasks, whether these follow one another, and the seconds of an epoch over all its data."""

    shares: Shares
    in_turn: bool
    seconds: float


@dataclass(slots=True)
class LaneSpeeds:
    """Speeds of a device's tasks side by side, relative to alone on the whole GPU: measured, else predicted."""

    model: RetentionModel = field(default_factory=lambda: RetentionModel(shipped_prior()))
    measured: dict[tuple[tuple[TaskName, float], ...], dict[TaskName, float]] = field(default_factory=dict)

    def learn(self, work: Sequence[Work], alone: Mapping[TaskName, float], together: Mapping[TaskName, float]) -> None:
        """Take in the seconds per sample of the tasks of a cycle, side by side and alone.

        A task speeds up once others are done. Its mean speed still describes these shares, because the next cycle has
        the same proportions of work; the model learns only from tasks that ran beside all others most of the time.
        """
        busy = {each.task: together[each.task] * each.samples for each in work if together.get(each.task)}
        speeds = {task: alone[task] / together[task] for task in busy if alone.get(task)}
        if not speeds:
            return
        key = tuple([(each.task, each.share) for each in work])
        before = self.measured.setdefault(key, speeds)
        self.measured[key] = {
            task: value + (1.0 - _NEW_PART) * (before.get(task, value) - value) for task, value in speeds.items()
        }
        least = min(busy.values())
        seen = [speeds.get(each.task) if busy.get(each.task, 0.0) * _IN_COMPANY <= least else None for each in work]
        sharers = [_sharer(each.task, each.batch_size, each.share, alone.get(each.task, 0.0)) for each in work]
        self.model.learn(sharers, Observed(tuple(seen), (1.0,) * len(sharers)))

    def speeds(self, tasks: Sequence[LaneTask], vectors: Sequence[Shares]) -> list[list[float]]:
        """Speeds of the tasks under each vector of shares."""
        mixes = [
            [
                _sharer(task.name, task.batch_size, share, task.sample_s)
                for task, share in zip(tasks, shares, strict=True)
            ]
            for shares in vectors
        ]
        found = [[each.mean for each in row] for row in self.model.predict(mixes)]
        for shares, row in zip(vectors, found, strict=True):
            known = self.measured.get(
                tuple([(task.name, share) for task, share in zip(tasks, shares, strict=True)]), {}
            )
            row[:] = [known.get(task.name, value) for task, value in zip(tasks, row, strict=True)]
        return found


def _sharer(task: TaskName, batch_size: int, share: float, sample_s: float) -> Sharer:
    return Sharer(task, task, share, Traits(sample_s * batch_size))


@dataclass(frozen=True, slots=True)
class _LaneEstimator(DeclaredEstimator):
    """The speeds as rates of jobs, for the share search."""

    lanes: LaneSpeeds = field(default_factory=LaneSpeeds)
    tasks: Mapping[JobId, LaneTask] = field(default_factory=dict)

    def mixed(self, kind: Kind, mixes: Sequence[Sequence[MixEntry]]) -> Sequence[Sequence[Estimate]]:
        if not mixes:
            return []
        tasks = [self.tasks[spec.id] for spec, *_ in mixes[0]]
        found = self.lanes.speeds(tasks, [tuple([share for _, share, _ in mix]) for mix in mixes])
        return [[Estimate(each) for each in row] for row in found]


def choose_lanes(
    lanes: LaneSpeeds, kind: Kind, tasks: Sequence[LaneTask], levels: Sequence[float], epochs: float
) -> LaneChoice:
    """The lanes that end these tasks' remaining epochs first, counting what it takes to start processes again.

    Compares four choices: side by side with the present lanes or with those of the share search, and in turn with the
    present lanes or with the whole GPU.
    """
    now = tuple([task.share for task in tasks])
    kept = [_side_by_side(lanes, tasks, now), _in_turn(lanes, tasks, now)]
    others = [_in_turn(lanes, tasks, (1.0,) * len(tasks)), _searched(lanes, kind, tasks, levels)]
    best = min(kept, key=lambda choice: choice.seconds)
    for other in others:
        load_s = max(
            [task.load_s for task, share in zip(tasks, other.shares, strict=True) if task.share != share] or [0.0]
        )
        gain_s = best.seconds - other.seconds
        if gain_s * epochs > load_s and gain_s > _LEAST_GAIN * best.seconds:
            best = other
    return best


def _side_by_side(lanes: LaneSpeeds, tasks: Sequence[LaneTask], shares: Shares) -> LaneChoice:
    (speeds,) = lanes.speeds(tasks, [shares])
    seconds = max([task.epoch_s / max(speed, _LEAST) for task, speed in zip(tasks, speeds, strict=True)])
    return LaneChoice(shares, False, seconds)


def _in_turn(lanes: LaneSpeeds, tasks: Sequence[LaneTask], shares: Shares) -> LaneChoice:
    speeds = [
        1.0 if share == 1.0 else lanes.speeds([task], [(share,)])[0][0]
        for task, share in zip(tasks, shares, strict=True)
    ]
    seconds = sum([task.epoch_s / max(speed, _LEAST) for task, speed in zip(tasks, speeds, strict=True)])
    return LaneChoice(shares, True, seconds)


def _searched(lanes: LaneSpeeds, kind: Kind, tasks: Sequence[LaneTask], levels: Sequence[float]) -> LaneChoice:
    """The shares that minimise the time until the last task is done; searched from equal and from proportional ones."""
    specs = [
        JobSpec(JobId(task.name), model=task.name, batch_size=task.batch_size, weight=task.epoch_s) for task in tasks
    ]
    estimates = _LaneEstimator(lanes=lanes, tasks={spec.id: task for spec, task in zip(specs, tasks, strict=True)})
    search = ShareSearch(estimates, kind, [Tenant(spec) for spec in specs], tuple(levels), objective="barrier")
    total = sum([task.epoch_s for task in tasks])
    start = tuple([Setting(min(levels, key=lambda level: abs(level - task.epoch_s / total))) for task in tasks])
    ends = [search.best(), search.best(start)]
    settings, _ = max(ends, key=lambda end: search.value(end[1]))
    return _side_by_side(lanes, tasks, tuple([setting.fraction for setting in settings]))
