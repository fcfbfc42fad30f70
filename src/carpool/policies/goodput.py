"""What an estimator may know beyond rates at one batch size: the best batch for each number of devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from carpool.core.estimates import Estimator
from carpool.core.model import JobSpec, Kind
from carpool.core.policy import Snapshot
from carpool.core.topology import Placement
from carpool.policies.speeds import placed_on

Goodput = tuple[float, int]  # units of work per second with the best batch size, and that size (0: the job's own)


@runtime_checkable
class KnowsGoodput(Protocol):
    """An estimator that also tunes batch sizes."""

    def goodputs(self, spec: JobSpec, counts: Sequence[int], several: Sequence[bool]) -> Sequence[Goodput]:
        """For each number of devices, on one node or over several; rate 0 where the job cannot run."""
        ...


@runtime_checkable
class CountsSteps(Protocol):
    """An estimator whose rates are steps per second, whatever the steps hold; others count progress."""

    def progress(self, spec: JobSpec, batch_size: int) -> float:
        """What a step with a batch is worth, in steps with the job's own."""
        ...


@runtime_checkable
class KnowsOwnBatch(Protocol):
    """An estimator that learns the batch size of trainings whose job does not name it."""

    def own_batch(self, spec: JobSpec) -> int:
        """The batch size that its author gave a job; 0: not known yet."""
        ...


def worth_of_step(estimates: Estimator, spec: JobSpec, batch_size: int) -> float:
    """By how much a rate with a batch has to be multiplied to compare it with one at the job's own."""
    if not batch_size or batch_size == spec.batch_size or not isinstance(estimates, CountsSteps):
        return 1.0
    return estimates.progress(spec, batch_size)


def own_batch(estimates: Estimator, spec: JobSpec) -> int:
    """A job's own batch size; 0: not known yet."""
    if spec.batch_size or not isinstance(estimates, KnowsOwnBatch):
        return spec.batch_size
    return estimates.own_batch(spec)


def goodputs(
    view: Snapshot, spec: JobSpec, kind: Kind, counts: Sequence[int], several: Sequence[bool]
) -> Sequence[Goodput]:
    """What the estimator believes; one that does not tune batch sizes is asked for rates at the job's own."""
    if isinstance(view.estimates, KnowsGoodput):
        return view.estimates.goodputs(spec, counts, several)
    found: list[Goodput] = []
    for count, spans in zip(counts, several, strict=True):
        placement = placed_on(view.cluster, kind, count)
        if spans and len(placement.groups) == 1:
            placement = Placement(((kind, count // 2), (kind, count - count // 2)))
        found.append((view.estimates.rate(spec, placement).mean, 0))
    return found
