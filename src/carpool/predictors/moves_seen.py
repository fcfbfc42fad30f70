"""What moves cost, read from a scheduler's own records: the time between an order and its effect, less work done."""

from __future__ import annotations

from dataclasses import dataclass

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
from carpool.predictors.moving import Move, MoveCost, MoveKind

_OVER = (JobFinished, JobFailed, JobCancelled)
_STOPPED = (ReleaseApplied, JobCrashed, JobPaused)


@dataclass(slots=True)
class _Course:
    """Where a job stands, as far as records tell."""

    spec: JobSpec
    held: Allocation | None = None
    has_run: bool = False
    at: float = 0.0  # when `done` and `rate` were true
    done: float = 0.0
    rate: float = 0.0  # 0: it stands still
    move: Move | None = None  # ordered and not yet in effect
    is_clear: bool = True  # whether only one order is on its way


class MovesSeen:
    """An observer that learns what moves cost. Estimators own one, and answer `move_s` from it.

    Standstill = seconds since the job was last known to work - work done since then / its rate: a job that goes on
    while its new devices are made ready loses only what it really lost. Where a second order followed before the first
    took effect nothing is learned.
    """

    def __init__(self, cost: MoveCost | None = None) -> None:
        self.cost = cost or MoveCost()
        self._courses: dict[JobId, _Course] = {}

    def move_s(self, spec: JobSpec) -> float | None:
        """Seconds that a change of devices is believed to cost a running job; None before any was seen."""
        if not self.cost.num_moves:
            return None
        width = spec.devices
        move = Move(MoveKind.PLACE, spec.model, float(spec.memory_bytes), width, width, is_warm=True)
        return self.cost.predict([move])[0].mean

    def record(self, record: Record) -> None:
        """Follow one call of `Scheduler.handle`."""
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
    """A plan gives a job something else, or takes it off."""
    if allocation is None:
        course.held, course.move = None, None
        return
    course.is_clear = course.move is None
    if course.rate == 0.0:
        course.at = at  # it stood still anyway until now
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
