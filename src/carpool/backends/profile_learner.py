"""Profile learner: turns step times and switching costs of running jobs into profiles."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import sqrt
from pathlib import Path
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
from carpool.jobs.entry_file import source_digest
from carpool.jobs.program import Program
from carpool.predictors.profiles.profile import (
    Costs,
    Measurement,
    Profile,
    measurement_key,
    merge_measurements,
    short_entry,
)
from carpool.runtime.executor.reports import Outcome, Report, Sized

_Leaving = JobFinished | JobFailed | JobCancelled | JobCrashed | JobPaused


class StepSetting(NamedTuple):
    """What a rate depends on: a placement and the models that share its devices."""

    placement: Placement
    beside: tuple[str, ...] = ()


@dataclass(slots=True)
class StepTimes:
    """Steps and seconds between successive reports in one setting."""

    steps: float = 0.0
    seconds: float = 0.0
    intervals: int = 0
    _squares: float = 0.0  # Σ n·x² over intervals of n steps at x seconds each

    def add(self, steps: float, seconds: float) -> None:
        self.steps += steps
        self.seconds += seconds
        self.intervals += 1
        self._squares += seconds**2 / steps

    @property
    def step_s(self) -> float:
        return self.seconds / self.steps

    @property
    def spread_s(self) -> float:
        """Standard deviation of independent steps: √(Σ n·(x − mean)²/(k − 1)) over k intervals."""
        if self.intervals < 2:
            return 0.0
        return sqrt(max(0.0, self._squares - self.steps * self.step_s**2) / (self.intervals - 1))


class _Gap(NamedTuple):
    """A time span, and the steps in it by setting."""

    seconds: float
    steps: tuple[tuple[float, StepSetting], ...]


class _Ordered(NamedTuple):
    """An order without steps yet."""

    since: float  # time of the order; for a running job, of its last report
    before: tuple[float, StepSetting] | None  # steps done then, and their setting; None: it held nothing


@dataclass(slots=True, eq=False)
class _JobTimes:
    """What one job holds, and its measurements."""

    model: str
    held: Allocation | None = None
    ordered: _Ordered | None = None
    base: float = 0.0  # steps done when the order was applied
    last: tuple[float, float] | None = None  # the last report (instant, steps done); None: in another setting
    timed: dict[StepSetting, StepTimes] = field(default_factory=dict)
    starts: list[_Gap] = field(default_factory=list)
    resizes: list[_Gap] = field(default_factory=list)
    ends: list[_Gap] = field(default_factory=list)


class StepTimeObserver:
    """An observer of the scheduler that measures step times by setting, and the costs of starts, moves and ends.

    Step times come from intervals between two reports in one setting. The cost of an order is the time up to the first
    report after it, less the time of the steps in between; a job that moves keeps running meanwhile.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._jobs: dict[JobId, _JobTimes] = {}
        self._totals: dict[JobId, float] = {}
        self._residents: dict[int, list[_JobTimes]] = {}  # by device

    def adopt(self, job: Job) -> None:
        self._jobs[job.id] = _JobTimes(job.spec.model, base=job.done)
        self._hold(self._jobs[job.id], job.desired)

    def forget(self, job: JobId) -> None:
        watched = self._jobs.pop(job, None)
        if watched is not None:
            self._hold(watched, None)
        self._totals.pop(job, None)

    def ended(self, job: JobId, steps: float) -> None:
        self._totals[job] = steps

    def timed(self, job: JobId) -> dict[StepSetting, StepTimes]:
        return self._jobs[job].timed if job in self._jobs else {}

    def costs(self, job: JobId) -> Costs:
        watched = self._jobs.get(job)
        if watched is None:
            return Costs()
        return Costs(*[_median_cost(watched, gaps) for gaps in (watched.starts, watched.resizes, watched.ends)])

    def record(self, record: Record) -> None:
        for fact in record.facts:
            self._take(record.at, fact)
        for change in record.planned.changes if record.planned is not None else ():
            self._change(record.at, change)

    def _take(self, at: float, fact: Fact) -> None:
        if isinstance(fact, JobSubmitted):
            self._jobs[fact.spec.id] = _JobTimes(fact.spec.model)
        elif isinstance(fact, AssignApplied | ProgressReported | _Leaving):
            watched = self._jobs.get(fact.job)
            if watched is not None:  # a forgotten job may still report
                self._take_of(at, fact, watched)
        elif isinstance(fact, NodeJoined):
            self._cluster = self._cluster.with_join(fact.name, fact.banks, replaces=fact.replaces)
        elif isinstance(fact, NodeLost):
            for device in self._cluster.nodes[fact.node].devices:
                for watched in tuple(self._residents.get(device, ())):
                    self._hold(watched, None)

    def _take_of(self, at: float, fact: AssignApplied | ProgressReported | _Leaving, watched: _JobTimes) -> None:
        if isinstance(fact, AssignApplied):
            watched.base = fact.done
        elif isinstance(fact, ProgressReported):
            if fact.alone:  # a probe stopped the others: intervals around it are not representative
                for stood in (watched, *self._beside(watched, watched.held)):
                    stood.last = None
            self._progress(at, watched, fact.done)
        else:
            if isinstance(fact, JobFinished):
                self._finish(at, fact.job, watched)
            self._hold(watched, None)

    def _progress(self, at: float, watched: _JobTimes, done: float) -> None:
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
            watched.timed.setdefault(setting, StepTimes()).add(done - made, at - since)
        watched.last = at, done

    def _finish(self, at: float, job: JobId, watched: _JobTimes) -> None:
        """Attribute the time since the last report to the last steps and the end."""
        if watched.last is None or watched.held is None:
            return
        (since, done), setting = watched.last, self._setting(watched)
        left = self._totals.get(job, 0.0) - done
        if setting in watched.timed and left >= 0.0:
            watched.ends.append(_Gap(at - since, ((left, setting),)))
        elif left > 0.0 and at > since:
            watched.timed.setdefault(setting, StepTimes()).add(left, at - since)

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

    def _hold(self, watched: _JobTimes, allocation: Allocation | None) -> None:
        """Change what a job holds; jobs that share its devices are in another setting from now on."""
        before, watched.held, watched.last = watched.held, allocation, None
        for device in before.devices() if before is not None else ():
            self._residents[device].remove(watched)
        for device in allocation.devices() if allocation is not None else ():
            self._residents.setdefault(device, []).append(watched)
        for other in (*self._beside(watched, before), *self._beside(watched, allocation)):
            other.last = None

    def _beside(self, watched: _JobTimes, allocation: Allocation | None) -> list[_JobTimes]:
        """Other jobs on the devices of an allocation, each once."""
        if allocation is None:
            return []
        found = {id(other): other for device in allocation.devices() for other in self._residents.get(device, ())}
        return [other for other in found.values() if other is not watched]

    def _setting(self, watched: _JobTimes) -> StepSetting:
        assert watched.held is not None
        beside = sorted(other.model for other in self._beside(watched, watched.held))
        return StepSetting(self._cluster.placement(watched.held), tuple(beside))


def _median_cost(watched: _JobTimes, gaps: list[_Gap]) -> float | None:
    """The median of gaps, each less the time of its steps; None where no step time is known."""
    found = []
    for seconds, made in gaps:
        if all(setting in watched.timed for steps, setting in made if steps):
            worked_s = sum(steps * watched.timed[setting].step_s for steps, setting in made if steps)
            found.append(max(0.0, seconds - worked_s))
    return median(found) if found else None


def updated_profile(
    before: Profile | None, program: Program, sized: Sized, timed: Mapping[StepSetting, StepTimes], costs: Costs
) -> Profile:
    """A profile with new measurements on one device type, alone or beside one job; a changed source starts afresh."""
    source = source_digest(program.entry, Path(program.folder))
    if before is None or before.source != source or before.machine != platform.node():
        before = Profile(
            short_entry(program.entry),
            program.args,
            source,
            sized.batch_size,
            sized.num_samples,
            stop_steps=sized.total_steps,
            machine=platform.node(),
        )
    known = {measurement_key(each): each for each in before.measurements}
    seen = [
        _joined(known.get(measurement_key(each)), each)
        for where, times in timed.items()
        if (each := _measurement(program, sized, where, times)) is not None
    ]
    costs = costs.over(before.costs)
    return replace(before, measurements=merge_measurements(before.measurements, seen), **costs._asdict())


def _measurement(program: Program, sized: Sized, where: StepSetting, times: StepTimes) -> Measurement | None:
    placement = where.placement
    if len(placement.groups) > 1 or len(where.beside) > 1:
        return None  # a profile cannot represent it
    return Measurement(
        placement.groups[0][0],
        placement.num_devices,
        placement.batch_size or sized.batch_size,
        share=placement.fraction,
        exact=program.exact,
        beside=short_entry(where.beside[0]) if where.beside else "",
        steps=int(times.steps),
        step_s=times.step_s,
        step_spread_s=times.spread_s,
    )


def _joined(old: Measurement | None, new: Measurement) -> Measurement:
    """A measurement with both step times, weighted by their steps; other fields are those of the old one."""
    if old is None or old.step_s is None or new.step_s is None:
        return new if old is None else replace(old, steps=new.steps, step_s=new.step_s, step_spread_s=new.step_spread_s)
    steps = max(1, old.steps) + new.steps
    portion = new.steps / steps
    spread = sqrt((1.0 - portion) * (old.step_spread_s or 0.0) ** 2 + portion * (new.step_spread_s or 0.0) ** 2)
    step_s = (1.0 - portion) * old.step_s + portion * new.step_s
    return replace(old, steps=steps, step_s=step_s, step_spread_s=spread)


class ProfileLearner:
    """Turns records and reports into profiles of jobs."""

    def __init__(self, cluster: Cluster, version: str) -> None:
        self._version = version
        self._step_times = StepTimeObserver(cluster)
        self._sized: dict[JobId, Sized] = {}

    def follow(self, jobs: Mapping[JobId, Job]) -> None:
        """Follow these recovered jobs from here on, and no others."""
        self._sized = {job: sized for job, sized in self._sized.items() if job in jobs}
        for job in jobs.values():
            self._step_times.adopt(job)

    def record(self, record: Record) -> None:
        self._step_times.record(record)

    def take(self, report: Report) -> None:
        match report:
            case Sized(job=job):
                self._sized[job] = report
            case Outcome(job=job, steps=steps):
                self._step_times.ended(job, steps)

    def sized(self, job: JobId) -> Sized | None:
        """What a training reported when it was loaded; None: nothing yet."""
        return self._sized.get(job)

    def profile(self, job: JobId, program: Program, before: Profile | None) -> Profile | None:
        """The previous profile with the new measurements; None without any."""
        timed, sized = self._step_times.timed(job), self._sized.get(job)
        if not timed or sized is None or not sized.batch_size or not program.entry:
            return None
        profile = updated_profile(before, program, sized, timed, self._step_times.costs(job))
        return replace(profile, version=self._version)

    def forget(self, job: JobId) -> None:
        self._sized.pop(job, None)
        self._step_times.forget(job)
