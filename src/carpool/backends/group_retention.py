"""Group retention: the part of its rate alone that a job keeps on a shared device, measured or else predicted."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from math import hypot
from typing import NamedTuple, Protocol

from carpool.core.estimates import Estimate, MixEntry
from carpool.core.model import Job, JobSpec, Kind
from carpool.core.scheduler import Scheduler
from carpool.core.topology import Neighbour, Placement
from carpool.predictors.sharing.retention import CorePrior, Observed, RetentionModel, Sharer, Traits, shipped_prior

_STEADY = 0.05  # least relative change of a measured group that is learned again
_MAX_SPREAD = 0.12  # relative spread below which a rate counts as measured: first steps are slower


class RateAlone(NamedTuple):
    """A rate without neighbours, and the share it was measured with."""

    rate: float
    share: float


class MeasuredRates(Protocol):
    """Source of measured rates and traits of jobs."""

    def measured(self, spec: JobSpec, placement: Placement) -> Estimate | None: ...

    def rate_alone(self, spec: JobSpec, placement: Placement) -> RateAlone | None: ...

    def traits(self, spec: JobSpec, kind: Kind, batch_size: int) -> Traits: ...


class GroupRetention:
    """One retention model per device type, taught by the measured rates of groups."""

    def __init__(self, rates: MeasuredRates) -> None:
        self._rates = rates
        self._models: dict[Kind, RetentionModel] = {}
        self._learned: dict[tuple[Sharer, ...], Observed] = {}

    def retention(self, kind: Kind, mixes: Sequence[Sequence[MixEntry]]) -> list[list[Estimate]]:
        """For each job of each mix, as measured in this very mix, else as predicted."""
        found = self._model(kind).predict([[self._sharer(kind, *entry) for entry in mix] for mix in mixes])
        for mix, answers in zip(mixes, found, strict=True):
            for place, (spec, placement) in enumerate(_placed(kind, mix)):
                measured = self._measured(spec, placement)
                if measured is not None:
                    answers[place] = measured
        return found

    def predicted(self, spec: JobSpec, placement: Placement) -> Estimate:
        """The part of its rate on whole devices that a job keeps with a share and beside neighbours."""
        if placement.fraction == 1.0 and not placement.neighbours:
            return Estimate(1.0)
        kind = placement.groups[0][0]
        own = self._sharer(kind, spec, placement.fraction, placement.batch_size)
        others = [self._sharer(kind, n.spec, n.fraction, n.batch_size) for n in placement.neighbours]
        return self._model(kind).predict([[own, *others]])[0][0]

    def learn(self, spec: JobSpec, placement: Placement) -> None:
        """Learn the measured speeds of a group on one device."""
        if placement.num_devices != 1:
            return
        kind = placement.groups[0][0]
        own = (spec, placement.fraction, placement.batch_size)
        others = [(n.spec, n.fraction, n.batch_size) for n in placement.neighbours]
        mix = sorted([own, *others], key=lambda entry: entry[0].id)
        speeds: list[float | None] = []
        bases: list[float] = []
        for member, there in _placed(kind, mix):
            rate, alone = self._rates.measured(member, there), self._rates.rate_alone(member, there)
            is_known = rate is not None and alone is not None and rate.std <= _MAX_SPREAD * rate.mean
            speeds.append(rate.mean / alone.rate if is_known and rate is not None and alone is not None else None)
            bases.append(1.0 if alone is None else alone.share)
        sharers = tuple([self._sharer(kind, *entry) for entry in mix])
        observed, before = Observed(tuple(speeds), tuple(bases)), self._learned.get(sharers)
        if any(speed is not None for speed in speeds) and (before is None or _differs(before, observed)):
            self._learned[sharers] = observed
            self._model(kind).learn(sharers, observed)

    def _measured(self, spec: JobSpec, placement: Placement) -> Estimate | None:
        """The measured rate in exactly this mix over the rate alone on the whole device; None unless both are known."""
        there = self._rates.measured(spec, placement)
        alone = None if there is None else self._rates.rate_alone(spec, placement)
        if there is None or alone is None or there.std > _MAX_SPREAD * there.mean:
            return None
        under_cap = self.predicted(spec, Placement(placement.groups, alone.share, placement.batch_size))
        kept = min(1.0, there.mean / alone.rate * under_cap.mean)
        return Estimate(kept, kept * hypot(there.std / there.mean, under_cap.std / under_cap.mean))

    def _sharer(self, kind: Kind, spec: JobSpec, fraction: float, batch_size: int) -> Sharer:
        model = (spec.model, batch_size or spec.batch_size)
        return Sharer((spec.id, batch_size), model, fraction, self._rates.traits(spec, kind, batch_size))

    def _model(self, kind: Kind) -> RetentionModel:
        found = self._models.get(kind)
        if found is None:
            cores = cores_of(kind)
            prior = shipped_prior() if cores is None else CorePrior(cores)
            found = self._models[kind] = RetentionModel(prior)
        return found


def cores_of(kind: Kind) -> int | None:
    """Cores of a CPU device by the name of its type; None: not a CPU."""
    found = re.fullmatch(r"cpu(\d+)", kind)
    return None if found is None else int(found[1])


def _placed(kind: Kind, mix: Sequence[MixEntry]) -> Iterator[tuple[JobSpec, Placement]]:
    """The placement of each job of a mix on one device."""
    for place, (spec, fraction, batch_size) in enumerate(mix):
        others = tuple([Neighbour(*other) for other in (*mix[:place], *mix[place + 1 :])])
        yield spec, Placement(((kind, 1),), fraction, batch_size, others)


def _differs(before: Observed, now: Observed) -> bool:
    """Whether a measured group has changed enough to be learned again."""
    if before.bases != now.bases:
        return True
    return any(
        (old is None) != (new is None) or (old is not None and new is not None and abs(new - old) > _STEADY * old)
        for old, new in zip(before.speeds, now.speeds, strict=True)
    )


def neighbour_lookup(scheduler: Scheduler) -> Callable[[Job], Sequence[Neighbour] | None]:
    """A function that finds the jobs on a job's devices; None while one of them starts, changes or leaves."""

    def neighbours_of(job: Job) -> Sequence[Neighbour] | None:
        if job.observed is None or not scheduler.policy.shares_devices:
            return ()
        jobs, occupancy = scheduler.jobs, scheduler.snapshot().occupancy
        own = set(job.observed.devices())
        near = {resident.job for device in own for resident in occupancy.residents(device)} - {job.id}
        leaving = [jobs[other].observed for other in scheduler.unsettled if other != job.id]
        if any(held is not None and not own.isdisjoint(held.devices()) for held in leaving):
            return None
        found = []
        for other in sorted([jobs[name] for name in near], key=lambda other: other.seq):
            if other.is_starting or other.observed is None:
                return None
            found.append(Neighbour(other.spec, other.observed.shares[0].fraction, other.observed.batch_size))
        return found

    return neighbours_of
