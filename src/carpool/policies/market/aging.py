"""Waiting credit: the number of times that waiting has doubled a job's weight; never lost.

Jobs are classed by length over weight, the order in which they would run if none waited for long; each class has a
clock. A job earns one unit of credit per `patience_s` of waiting, or per 1.5 times the time that all devices need for
the jobs before it in that order if that is longer: shorter jobs may overtake, and an overloaded cluster keeps serving
them first. A longer queue slows a clock from then on and never sets it back. The credit of a job is what the clock of
its class has advanced while the job had no devices. While a job runs its weight stays the same; if it grew, the job
would block shorter ones until it ended. The charge for preemptions keeps waiting jobs from preempting it one after
another.

After n preemptions the next one has to save 2^(n − 1) times the cost of a move. So the number of preemptions of a job
grows with the logarithm of what other jobs gain, not with the number of jobs that overtake it. Where moves are cheap a
job may be preempted often, where they are expensive only a few times.

The job that has waited longest counts as much as far shorter ones (`overdue`). Without that, jobs of hours would
preempt jobs of days one after another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from carpool.core.draft import Draft
from carpool.core.model import Job, JobId
from carpool.core.policy import Snapshot
from carpool.policies.market.knapsack import Floats

Classes = NDArray[np.intp]

_CLASSES, _RATIO, _SHORT_S = 8, 4.0, 60.0  # number of classes, the ratio of their bounds, and the first bound
_PASSES = 1.5  # times that the jobs before it may pass before a weight doubles
_FACTOR = 1.5  # change of a pace at which a mark is set
_MOST_MARKS = 64  # beyond that, every second one of the older half is dropped
_MOST_CREDIT = 30.0  # doublings of a weight
_LEAST = 0.05  # least credit that is stored
_FREE_STOPS, _MOST_STOPS = 1, 60  # preemptions that are free (the end of a trial is one), and the most that are counted
_FREE = 1.0  # credit up to which a weight does not grow
_OVERDUE, _OVERDUE_PART = 6.0, 0.1  # credit of overdue jobs, and the part of the devices that they may have together


def classes_of(ratios: Floats) -> Classes:
    """[job]: the class of its length in device-seconds over its weight."""
    steps = np.ceil(np.log(np.maximum(ratios, _SHORT_S) / _SHORT_S) / np.log(_RATIO))
    return np.asarray(np.minimum(steps, _CLASSES - 1).astype(np.intp))


def patience_of(lengths: Floats, classes: Classes, supply: float, least_s: float) -> Floats:
    """[class]: seconds of waiting for a unit of credit."""
    work, num = np.bincount(classes, lengths, _CLASSES), np.bincount(classes, minlength=_CLASSES)
    before = np.cumsum(work) - work * (num + 1.0) / (2.0 * np.maximum(num, 1.0))  # counts half of its class
    return np.asarray(np.maximum(least_s, _PASSES * before / max(1.0, supply)))


@dataclass(slots=True)
class WaitingClocks:
    """The clocks of all classes, linear between marks, and what jobs had earned when they last started or stopped."""

    times: Floats = field(default_factory=lambda: np.zeros(0))  # [mark]: where a pace changed
    marked: Floats = field(default_factory=lambda: np.zeros((0, _CLASSES)))  # [mark, class]: the clocks then
    patience_s: Floats = field(default_factory=lambda: np.ones(_CLASSES))  # [class]: since the last mark
    earned: dict[JobId, float] = field(default_factory=dict)
    stops: dict[JobId, int] = field(default_factory=dict)  # preemptions
    is_changed: bool = False  # since they were read from the note

    @classmethod
    def of(cls, note: Mapping[str, Any], view: Snapshot) -> WaitingClocks:
        stored = note.get("waiting")
        if not stored:
            return cls()
        times, marked, patience_s, earned, *added = stored
        kept = {JobId(job): float(credit) for job, credit in earned.items() if job in view.jobs}
        stops = {JobId(job): int(count) for job, count in (added[0] if added else {}).items() if job in view.jobs}
        return cls(np.array(times), np.array(marked).reshape(-1, _CLASSES), np.array(patience_s), kept, stops)

    def note(self) -> list[Any]:
        return [self.times.tolist(), self.marked.tolist(), self.patience_s.tolist(), self.earned, self.stops]

    def advance(self, at: float, patience_s: Floats, first: float) -> None:
        """Let the clocks run at these paces from now on; `first` is when the oldest job was submitted."""
        if not len(self.times):
            self.times, self.marked = np.array([first]), np.zeros((1, _CLASSES))
            self.patience_s, self.is_changed = patience_s, True
        ratio = patience_s / self.patience_s
        if ratio.max() <= _FACTOR and ratio.min() * _FACTOR >= 1.0:
            return
        every = np.arange(_CLASSES)
        now = self.readings(np.full(_CLASSES, at), every)
        kept = np.arange(max(0, int(np.searchsorted(self.times, first, "right")) - 1), len(self.times))
        if len(kept) >= _MOST_MARKS:
            half = len(kept) // 2
            kept = np.concatenate([kept[:half:2], kept[half:]])
        self.times = np.append(self.times[kept], at)
        self.marked = np.vstack([self.marked[kept], now])
        self.patience_s, self.is_changed = patience_s, True

    def readings(self, times: Floats, classes: Classes) -> Floats:
        """[i]: the clock of `classes[i]` at `times[i]`."""
        last = np.clip(np.searchsorted(self.times, times, "right") - 1, 0, len(self.times) - 1)
        following = np.minimum(last + 1, len(self.times) - 1)
        spans, gained = self.times[following] - self.times[last], self.marked[following] - self.marked[last]
        is_open = following == last
        rows = np.arange(len(times))
        pace = np.where(is_open, 1.0 / self.patience_s[classes], gained[rows, classes] / np.where(is_open, 1.0, spans))
        return np.asarray(self.marked[last, classes] + np.maximum(0.0, times - self.times[last]) * pace)

    def credit(self, jobs: Sequence[Job], classes: Classes, at: float) -> Floats:
        """[job]: its credit."""
        earned = self.earned
        had = np.array([earned.get(job.spec.id, 0.0) for job in jobs]) if earned else np.zeros(len(jobs))
        rows = np.flatnonzero(np.array([job.desired is None for job in jobs]))
        if not len(rows):
            return had
        begun = np.array([jobs[row].since for row in rows.tolist()])
        now = self.readings(np.full(_CLASSES, at), np.arange(_CLASSES))
        had[rows] = had[rows] + now[classes[rows]] - self.readings(begun, classes[rows])
        return had

    def keep(self, jobs: Sequence[Job], credit: Floats, draft: Draft) -> None:
        """Store the credit of jobs that start or stop now, and count those that stop."""
        changes = draft.changes
        for job_id, stopped in changes.items():
            if stopped.allocation is None and draft.view.jobs[job_id].desired is not None:
                self.stops[job_id] = self.stops.get(job_id, 0) + 1
                self.is_changed = True
        for row in np.flatnonzero(credit > _LEAST).tolist() if changes else ():
            job = jobs[row]
            change = changes.get(job.spec.id)
            if change is not None and (job.desired is None) != (change.allocation is None):
                self.earned[job.spec.id] = float(credit[row])
                self.is_changed = True

    def preemption_factors(self, jobs: Sequence[Job]) -> Floats:
        """[job]: the multiple of a move's cost that preempting it once more has to save."""
        if not self.stops:
            return np.ones(len(jobs))
        counted = [min(self.stops.get(job.spec.id, 0), _MOST_STOPS) - _FREE_STOPS for job in jobs]
        return np.asarray(2.0 ** np.maximum(0, counted))


def aged(weights: Floats, credit: Floats) -> Floats:
    """Weights, doubled for every unit of credit beyond the first."""
    return np.asarray(weights * 2.0 ** np.clip(credit - _FREE, 0.0, _MOST_CREDIT))


def overdue(view: Snapshot, jobs: Sequence[Job], lengths: Floats, wait_s: float) -> Floats:
    """[job]: further credit of the jobs that waited longest: at least one, and what fits into a tenth of the devices.

    Only waiting beyond `wait_s` counts (0: none), and beyond the time that the devices need for all waiting jobs: in an
    overloaded cluster each device-second for a long job delays many short ones. Waiting after a preemption counts too.
    A job keeps this credit while it runs, until another one has waited longer. Elastic jobs get none: they would take
    all devices. No job gets any if there are several device types (it would take the fastest), or while the length of
    any waiting job is unknown.
    """
    found = np.zeros(len(jobs))
    ages = view.at - np.array([job.submitted_at for job in jobs])
    if not wait_s or ages.max() <= wait_s or len(view.cluster.kinds) > 1:
        return found
    supply = view.cluster.num_devices
    waits = np.array([job.desired is None for job in jobs])
    if not all(view.estimates.knows_length(jobs[row]) for row in np.flatnonzero(waits).tolist()):
        return found
    grace_s = max(wait_s, float(lengths[waits].sum()) / supply)
    old = [row for row in np.flatnonzero(ages > grace_s).tolist() if jobs[row].spec.narrowest == jobs[row].spec.widest]
    waited_s = {row: ages[row] - view.attained_s(jobs[row]) / jobs[row].spec.devices for row in old}
    room = _OVERDUE_PART * supply
    for row in sorted(old, key=lambda row: (-waited_s[row], jobs[row].seq)):
        width = jobs[row].spec.devices
        if waited_s[row] <= grace_s or (found.any() and width > room):
            break
        found[row] = _OVERDUE
        room -= width
    return found
