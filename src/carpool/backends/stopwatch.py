"""What a run shows of its jobs: steps and seconds in every setting, and what starts, changes and ends cost."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import sqrt
from statistics import median
from typing import NamedTuple

from carpool.core.messages import (
    AssignApplied,
    Change,
    Fact,
    JobCancelled,
    JobCrashed,
    JobFailed,
    JobFinished,
    JobPaused,
    JobSubmitted,
    NodeJoined,
    NodeLost,
    ProgressReported,
    Record,
)
from carpool.core.model import Allocation, Job, JobId
from carpool.core.topology import Cluster, Placement
from carpool.predictors.profile import Costs

_Leaving = JobFinished | JobFailed | JobCancelled | JobCrashed | JobPaused
_LEAVE = (JobFinished, JobFailed, JobCancelled, JobCrashed, JobPaused)


class Circumstances(NamedTuple):
    """All that a rate depends on: where a job is, and which models are on its devices with it."""

    placement: Placement
    beside: tuple[str, ...] = ()


@dataclass(slots=True)
class Timed:
    """Steps and seconds between reports that followed each other in one setting."""

    steps: float = 0.0
    seconds: float = 0.0
    intervals: int = 0
    _squares: float = 0.0  # Σ n·x² over intervals of n steps at x seconds each

    def add(self, steps: float, seconds: float) -> None:
        """Take one interval in."""
        self.steps += steps
        self.seconds += seconds
        self.intervals += 1
        self._squares += seconds**2 / steps

    @property
    def step_s(self) -> float:
        """Mean seconds of a step."""
        return self.seconds / self.steps

    @property
    def spread_s(self) -> float:
        """Standard deviation from step to step, if steps are independent: √(Σ n·(x − mean)²/(k − 1)) of k intervals."""
        if self.intervals < 2:
            return 0.0
        return sqrt(max(0.0, self._squares - self.steps * self.step_s**2) / (self.intervals - 1))


class _Gap(NamedTuple):
    """Time of which a part went into steps: how many, and in which settings."""

    seconds: float
    steps: tuple[tuple[float, Circumstances], ...]


class _Ordered(NamedTuple):
    """An order that shows no steps yet."""

    since: float  # when it was given; for a job that runs meanwhile, when it last reported
    before: tuple[float, Circumstances] | None  # steps done then, and where; None: it held nothing


@dataclass(slots=True, eq=False)
class _Watched:
    """One job: what it holds, since when, and what was seen of it."""

    model: str
    held: Allocation | None = None
    ordered: _Ordered | None = None
    base: float = 0.0  # steps done when it was carried out
    last: tuple[float, float] | None = None  # the last report: instant, steps done; None: nothing can be told from it
    timed: dict[Circumstances, Timed] = field(default_factory=dict)
    starts: list[_Gap] = field(default_factory=list)
    resizes: list[_Gap] = field(default_factory=list)
    ends: list[_Gap] = field(default_factory=list)


class Stopwatch:
    """An observer of the scheduler that adds up steps and seconds, apart for every setting.

    Only what lies between two reports in the same setting counts as running. What lies between an order and the first
    report, less the time that its steps take later on, is the cost of the order. A job that moves goes on where it is
    while its new devices are made ready: those steps do not count as lost either.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._jobs: dict[JobId, _Watched] = {}
        self._totals: dict[JobId, float] = {}
        self._residents: dict[int, list[_Watched]] = {}  # by device

    def adopt(self, job: Job) -> None:
        """Follow a job from here on that was submitted before; what it holds tells nothing until its next report."""
        self._jobs[job.id] = _Watched(job.spec.model, base=job.done)
        self._hold(self._jobs[job.id], job.desired)

    def forget(self, job: JobId) -> None:
        """A job that is over needs no place any more, nor holds anything."""
        watched = self._jobs.pop(job, None)
        if watched is not None:
            self._hold(watched, None)
        self._totals.pop(job, None)

    def ended(self, job: JobId, steps: float) -> None:
        """How many steps a job that finishes has made."""
        self._totals[job] = steps

    def timed(self, job: JobId) -> dict[Circumstances, Timed]:
        """Steps and seconds of a job in every setting in which it was seen."""
        return self._jobs[job].timed if job in self._jobs else {}

    def costs(self, job: JobId) -> Costs:
        """The usual cost of what was seen of a job."""
        watched = self._jobs.get(job)
        if watched is None:
            return Costs()
        return Costs(*[_usual(watched, gaps) for gaps in (watched.starts, watched.resizes, watched.ends)])

    def record(self, record: Record) -> None:
        """Take in one record."""
        for fact in record.facts:
            self._take(record.at, fact)
        for change in record.planned.changes if record.planned is not None else ():
            self._change(record.at, change)

    # ---------------------------------------------------------------------------------------------------------- facts
    def _take(self, at: float, fact: Fact) -> None:
        if isinstance(fact, JobSubmitted):
            self._jobs[fact.spec.id] = _Watched(fact.spec.model)
        elif isinstance(fact, (AssignApplied, ProgressReported, *_LEAVE)):
            watched = self._jobs.get(fact.job)
            if watched is not None:  # of one that was forgotten some last words may come
                self._take_of(at, fact, watched)
        elif isinstance(fact, NodeJoined):
            if all(node.name != fact.name for node in self._cluster.nodes):
                self._cluster = self._cluster.joined(fact.name, fact.banks)
        elif isinstance(fact, NodeLost):
            for device in self._cluster.nodes[fact.node].devices:
                for watched in tuple(self._residents.get(device, ())):
                    self._hold(watched, None)

    def _take_of(self, at: float, fact: AssignApplied | ProgressReported | _Leaving, watched: _Watched) -> None:
        if isinstance(fact, AssignApplied):
            watched.base = fact.done
        elif isinstance(fact, ProgressReported):
            if fact.alone:  # others stood still for it: no interval around this one tells how they run together
                for stood in (watched, *self._beside(watched, watched.held)):
                    stood.last = None
            self._progress(at, watched, fact.done)
        else:
            if isinstance(fact, JobFinished):
                self._finish(at, fact.job, watched)
            self._hold(watched, None)

    def _progress(self, at: float, watched: _Watched, done: float) -> None:
        if watched.held is None:
            return
        setting = self._setting(watched)
        if watched.ordered is not None:
            since, before = watched.ordered
            after = (done - watched.base, setting)
            if before is None:
                watched.starts.append(_Gap(at - since, (after,)))
            else:
                watched.resizes.append(_Gap(at - since, ((watched.base - before[0], before[1]), after)))
            watched.ordered = None
        elif watched.last is not None and done > watched.last[1] and at > watched.last[0]:
            since, made = watched.last
            watched.timed.setdefault(setting, Timed()).add(done - made, at - since)
        watched.last = at, done

    def _finish(self, at: float, job: JobId, watched: _Watched) -> None:
        """The time since the last report went into the last steps and the end; of a short job it is all there is."""
        if watched.last is None or watched.held is None:
            return
        (since, done), setting = watched.last, self._setting(watched)
        left = self._totals.get(job, 0.0) - done
        if setting in watched.timed and left >= 0.0:
            watched.ends.append(_Gap(at - since, ((left, setting),)))
        elif left > 0.0 and at > since:
            watched.timed.setdefault(setting, Timed()).add(left, at - since)

    # -------------------------------------------------------------------------------------------------------- holding
    def _change(self, at: float, change: Change) -> None:
        watched = self._jobs.get(change.job)
        if watched is None:
            return
        held, last = watched.held, watched.last
        setting = None if held is None else self._setting(watched)
        self._hold(watched, change.allocation)
        watched.ordered = None
        if change.allocation is None:
            return
        if held is None:
            watched.ordered = _Ordered(at, None)
        elif last is not None and setting is not None and not held.same_devices(change.allocation):
            watched.ordered = _Ordered(last[0], (last[1], setting))

    def _hold(self, watched: _Watched, allocation: Allocation | None) -> None:
        """Hold something else; who is on the same devices runs in another setting from now on."""
        before, watched.held, watched.last = watched.held, allocation, None
        for device in before.devices() if before is not None else ():
            self._residents[device].remove(watched)
        for device in allocation.devices() if allocation is not None else ():
            self._residents.setdefault(device, []).append(watched)
        for other in (*self._beside(watched, before), *self._beside(watched, allocation)):
            other.last = None

    def _beside(self, watched: _Watched, allocation: Allocation | None) -> list[_Watched]:
        """Who else is on the devices of an allocation, each once."""
        if allocation is None:
            return []
        there = {id(other): other for device in allocation.devices() for other in self._residents.get(device, ())}
        return [other for other in there.values() if other is not watched]

    def _setting(self, watched: _Watched) -> Circumstances:
        assert watched.held is not None
        beside = sorted(other.model for other in self._beside(watched, watched.held))
        return Circumstances(self._cluster.placement(watched.held), tuple(beside))


def _usual(watched: _Watched, gaps: list[_Gap]) -> float | None:
    """The median of gaps, each without what its steps take; None where no setting tells how long they take."""
    found = []
    for seconds, made in gaps:
        if all(setting in watched.timed for steps, setting in made if steps):
            worked_s = sum(steps * watched.timed[setting].step_s for steps, setting in made if steps)
            found.append(max(0.0, seconds - worked_s))
    return median(found) if found else None
