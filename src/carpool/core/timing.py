"""When a policy is asked: by its cadence, by what happened since it was asked last, and by what it asked for itself."""

from __future__ import annotations

from math import floor

from carpool.core.policy import Cadence


class Timing:
    """Keeps one policy's time. What it is told of plans and triggers is all it knows."""

    __slots__ = ("breath_s", "cadence", "is_triggered", "planned_at", "wanted_at")

    def __init__(self, cadence: Cadence) -> None:
        self.cadence = cadence
        self.breath_s = 0.0  # a plan is put off so long after the last one at least, whatever the cadence says
        self.is_triggered = False  # something has happened after which the cadence wants a plan
        self.planned_at: float | None = None  # when the policy was asked last
        self.wanted_at: float | None = None  # when the last plan wants to be followed by another

    @property
    def may_be_due(self) -> bool:
        """Whether there is anything to look at; False, as after most facts, saves the rest."""
        return self.is_triggered or self.wanted_at is not None or self.cadence.round_s > 0.0

    def is_due(self, at: float, *, has_jobs: bool) -> bool:
        """Whether the policy is asked now."""
        round_s = self.cadence.round_s
        if round_s:
            begun = _round_at(at, round_s)
            is_new = self.planned_at is None or _round_at(self.planned_at, round_s) < begun
            return has_jobs and is_new and begun * round_s == at
        if self.wanted_at is not None and at >= self.wanted_at:
            return True
        return self.is_triggered and (self.planned_at is None or at >= self.planned_at + self._interval_s)

    def next_at(self, at: float, *, has_jobs: bool) -> float | None:
        """When it will be due, if nothing happens before."""
        round_s = self.cadence.round_s
        if round_s:
            return (_round_at(at, round_s) + 1) * round_s if has_jobs else None
        if self.is_triggered and self.planned_at is not None:
            put_off = self.planned_at + self._interval_s
            return put_off if self.wanted_at is None else min(put_off, self.wanted_at)
        return self.wanted_at

    def planned(self, at: float, wanted_at: float | None) -> None:
        """The policy was asked."""
        self.is_triggered = False
        self.planned_at = at
        self.wanted_at = wanted_at

    def begin_anew(self) -> None:
        """Another policy will be asked, as soon as may be."""
        self.is_triggered = True
        self.planned_at = self.wanted_at = None

    @property
    def _interval_s(self) -> float:
        return max(self.cadence.min_interval_s, self.breath_s)


def _round_at(at: float, round_s: float) -> int:
    """The last round that has begun by `at`; rounds begin at whole multiples, as floats multiply."""
    number = floor(at / round_s)
    if (number + 1) * round_s <= at:
        return number + 1
    return number - 1 if number * round_s > at else number
