"""Move cost: seconds a job is stopped when it starts, moves or is resized, learned from scheduler records.

    log seconds = w · (1, is a start, is a cold one, kind, log state, log devices before and after) + own(model) + noise

A Bayesian linear regression (Bishop, "Pattern Recognition and Machine Learning", section 3.3), in closed form and
robust with few moves. `own` is shrunk towards 0, so a model that never moved is predicted like the others.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import exp, log, log1p, sqrt
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from carpool.core.errors import InputError
from carpool.core.estimates import Estimate
from carpool.core.messages import (
    AssignApplied,
    Fact,
    JobCancelled,
    JobCrashed,
    JobFailed,
    JobFinished,
    JobPaused,
    JobSubmitted,
    ProgressReported,
    Record,
    ReleaseApplied,
)
from carpool.core.model import Allocation, JobId, JobSpec

Floats = NDArray[np.float64]

_SCHEMA = 1
_KEPT = 500  # newest moves kept: machines and software change
_LEAST_S = 1e-4  # least duration of a move
_STATE = 1e8  # bytes of state from which its size matters
_LEVEL, _BY_START, _BY_KIND, _BY_TRAIT, _BY_MODEL = 4.0, 2.0, 0.5, 0.5, 0.5  # prior standard deviations, in logarithms
_NOISE = 0.5  # expected spread of the logarithm of one move, worth this many moves:
_NOISE_COUNT = 2.0


class MoveKind(StrEnum):
    """What a move changes."""

    START = "start"  # from no devices
    GROW = "grow"
    SHRINK = "shrink"
    PLACE = "place"  # other devices, equally many
    SETTING = "setting"  # the same devices, another share, turn or batch size


_KINDS = tuple(MoveKind)


class Move(NamedTuple):
    """One change of a job's allocation."""

    kind: MoveKind
    model: str = ""
    state_bytes: float = 0.0  # per device; 0: unknown
    before: int = 0  # devices
    after: int = 1
    is_warm: bool = False  # whether it has run before, so state and processes may still exist


class MoveCost:
    """Predicts the seconds of a move, from measured moves."""

    def __init__(self, prior_s: float = 0.1) -> None:
        self.prior_s = prior_s  # expected duration before any move was seen

    def fit(self, moves: Sequence[Move], seconds: Sequence[float]) -> MoveCost:
        self.moves_: list[Move] = []
        self.seconds_: list[float] = []
        return self.update(moves, seconds)

    def update(self, moves: Sequence[Move], seconds: Sequence[float]) -> MoveCost:
        """Learn from more moves; equal to fitting all at once."""
        if not hasattr(self, "moves_"):
            return self.fit(moves, seconds)
        if len(moves) != len(seconds) or min(seconds, default=0.0) < 0.0:
            raise InputError(f"{len(moves)} moves come with the seconds {list(seconds)}")
        self.moves_ = [*self.moves_, *moves][-_KEPT:]
        self.seconds_ = [*self.seconds_, *map(float, seconds)][-_KEPT:]
        self._learned: _Learned | None = None
        return self

    @property
    def num_moves(self) -> int:
        return len(getattr(self, "moves_", ()))

    def predict(self, moves: Sequence[Move]) -> list[Estimate]:
        """Median seconds of stall, with a first-order spread."""
        if not self.num_moves:
            return [Estimate(self.prior_s, self.prior_s) for _ in moves]
        if self._learned is None:
            self._learned = _Learned(self.moves_, self.seconds_, log(max(self.prior_s, _LEAST_S)))
        return [self._learned.answer(move) for move in moves]

    def save(self, path: str | Path) -> None:
        seen = {"moves": getattr(self, "moves_", []), "seconds": getattr(self, "seconds_", [])}
        Path(path).write_text(json.dumps({"schema": _SCHEMA, "prior_s": self.prior_s, **seen}), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> MoveCost:
        try:
            document = json.loads(Path(path).read_text(encoding="utf-8"))
            moves = [Move(MoveKind(kind), *others) for kind, *others in document["moves"]]
            model = cls(document["prior_s"])
            return model.fit(moves, document["seconds"]) if moves else model
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"is not a saved model of move costs: {error}", where=str(path)) from None


class _Learned:
    """The weights and their covariance."""

    def __init__(self, moves: Sequence[Move], seconds: Sequence[float], expected: float) -> None:
        self._expected = expected
        self._models = {model: place for place, model in enumerate(dict.fromkeys(move.model for move in moves))}
        rows = np.array([self._row(move) for move in moves])
        observed = np.log(np.maximum(seconds, _LEAST_S)) - expected
        prior = np.array([_LEVEL, _BY_START, _BY_START, *[_BY_KIND] * len(_KINDS), *[_BY_TRAIT] * 3])
        prior = np.concatenate([prior, np.full(len(self._models), _BY_MODEL)])
        self._variance = _NOISE**2
        for _ in range(3):  # the noise and the weights depend on each other
            precision = rows.T @ rows / self._variance + np.diag(prior**-2)
            self._covariance = np.linalg.inv(precision)
            self._weights = self._covariance @ rows.T @ observed / self._variance
            left = float(np.sum((observed - rows @ self._weights) ** 2))
            self._variance = (left + _NOISE_COUNT * _NOISE**2) / (len(moves) + _NOISE_COUNT)

    def answer(self, move: Move) -> Estimate:
        row = self._row(move)
        spread = sqrt(float(row @ self._covariance @ row) + self._variance)
        if move.model not in self._models:
            spread = sqrt(spread**2 + _BY_MODEL**2)
        median = exp(self._expected + float(row @ self._weights))
        return Estimate(median, median * min(spread, 3.0))

    def _row(self, move: Move) -> Floats:
        is_start = move.kind is MoveKind.START
        kinds = [float(move.kind is kind) for kind in _KINDS]
        traits = [log1p(move.state_bytes / _STATE), log1p(move.before), log1p(move.after)]
        own = [float(move.model == model) for model in self._models]
        return np.array([1.0, float(is_start), float(is_start and not move.is_warm), *kinds, *traits, *own])


_OVER = (JobFinished, JobFailed, JobCancelled)
_STOPPED = (ReleaseApplied, JobCrashed, JobPaused)


@dataclass(slots=True)
class _Course:
    """A job's state as known from records."""

    spec: JobSpec
    held: Allocation | None = None
    has_run: bool = False
    at: float = 0.0  # instant of `done` and `rate`
    done: float = 0.0
    rate: float = 0.0  # 0: stopped
    move: Move | None = None  # ordered and not yet applied
    is_clear: bool = True  # no second order followed the pending one


class MoveCostObserver:
    """Observer that learns the cost of moves; estimators own one and answer `move_s` from it.

    Standstill = seconds since the last known progress - work done since then / rate, so a job that continues while its
    new devices are prepared is charged only what it lost. If a second order followed before the first was applied,
    nothing is learned.
    """

    def __init__(self, cost: MoveCost | None = None) -> None:
        self.cost = cost or MoveCost()
        self._courses: dict[JobId, _Course] = {}

    def move_s(self, spec: JobSpec) -> float | None:
        """Estimated seconds that a change of devices costs a running job; None before any was seen."""
        if not self.cost.num_moves:
            return None
        width = spec.devices
        move = Move(MoveKind.PLACE, spec.model, float(spec.memory_bytes), width, width, is_warm=True)
        return self.cost.predict([move])[0].mean

    def record(self, record: Record) -> None:
        ignored = set(map(id, record.ignored))
        for fact in record.facts:
            if id(fact) not in ignored:
                self._follow(record.at, fact)
        for job, allocation, _ in record.planned.changes if record.planned else ():
            course = self._courses.get(job)
            if course is not None:
                _order(course, record.at, allocation)

    def _follow(self, at: float, fact: Fact) -> None:
        if isinstance(fact, JobSubmitted):
            self._courses[fact.spec.id] = _Course(fact.spec)
            return
        course = self._courses.get(getattr(fact, "job", JobId("")))
        if course is None:
            return
        if isinstance(fact, _OVER):
            del self._courses[course.spec.id]
        elif isinstance(fact, _STOPPED):
            course.rate, course.held, course.move = 0.0, None, None
        elif isinstance(fact, AssignApplied):
            self._take_effect(course, at, fact)
        elif isinstance(fact, ProgressReported):
            course.at, course.done, course.rate = at, fact.done, fact.rate

    def _take_effect(self, course: _Course, at: float, fact: AssignApplied) -> None:
        if course.move is not None and course.is_clear:
            worked_s = (fact.done - course.done) / course.rate if course.rate > 0.0 else 0.0
            self.cost.update([course.move], [max(0.0, at - course.at - worked_s)])
        course.at, course.done, course.rate = at, fact.done, 0.0
        course.move, course.is_clear, course.has_run = None, True, True


def _order(course: _Course, at: float, allocation: Allocation | None) -> None:
    """Record that a plan changes or releases a job."""
    if allocation is None:
        course.held, course.move = None, None
        return
    course.is_clear = course.move is None
    if course.rate == 0.0:
        course.at = at  # it was stopped until now anyway
    course.move = _move(course, allocation)
    course.held = allocation


def _move(course: _Course, after: Allocation) -> Move:
    spec, held = course.spec, course.held
    before = 0 if held is None else held.num_devices
    if held is None:
        kind = MoveKind.START
    elif held.same_devices(after):
        kind = MoveKind.SETTING
    elif before == after.num_devices:
        kind = MoveKind.PLACE
    else:
        kind = MoveKind.GROW if before < after.num_devices else MoveKind.SHRINK
    return Move(kind, spec.model, float(spec.memory_bytes), before, after.num_devices, course.has_run)
