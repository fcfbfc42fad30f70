"""Queries to the estimator shared by policies: rates, memory, utilization, goodput and similarity of jobs."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol, runtime_checkable

from carpool.core.estimates import Estimator, Use
from carpool.core.model import Job, JobSpec, Kind
from carpool.core.policy import Snapshot
from carpool.core.topology import Cluster, Placement


def placed_on(cluster: Cluster, kind: Kind, count: int) -> Placement:
    """`count` devices of one kind on as few nodes as possible."""
    whole, rest = divmod(count, cluster.node_size[kind])
    full = ((kind, cluster.node_size[kind]),) * whole
    return Placement(((kind, rest), *full) if rest else full)


def rate_on(view: Snapshot, spec: JobSpec, kind: Kind, count: int = 0) -> float:
    """Believed rate on `count` devices of a kind (as many as asked for, unless said otherwise)."""
    return view.estimates.rate(spec, placed_on(view.cluster, kind, count or spec.devices)).mean


def kinds_of(view: Snapshot, spec: JobSpec, count: int = 0) -> list[Kind]:
    """Kinds the job may use that have enough devices and memory for it, in its own order, else in the cluster's."""
    capacity, least, width = view.cluster.capacity, view.cluster.least_memory, count or spec.devices
    return [
        kind
        for kind in spec.kinds or capacity
        if capacity.get(kind, 0) >= width and not 0 < least.get(kind, 0) < spec.memory_bytes
    ]


def by_rate(view: Snapshot, spec: JobSpec, count: int = 0) -> list[tuple[float, Kind]]:
    """(rate, kind) for every kind the job may use, fastest first, ties in the cluster's order."""
    rates = [(rate_on(view, spec, kind, count), kind) for kind in kinds_of(view, spec, count)]
    return sorted(rates, key=lambda pair: -pair[0])


def best_rate(view: Snapshot, spec: JobSpec) -> float:
    """The rate on the fastest kind; 0 when the job fits nowhere."""
    return max([rate_on(view, spec, kind) for kind in kinds_of(view, spec)], default=0.0)


def seconds_left(view: Snapshot, job: Job, rate: float) -> float:
    """Remaining work over a rate; infinite when it is not known or there is no rate."""
    return view.estimates.remaining(job, view.at).mean / rate if rate > 0.0 else float("inf")


def kind_held(view: Snapshot, job: Job) -> Kind | None:
    """The kind of the first device a job holds."""
    return None if job.desired is None else view.cluster.kind_of(job.desired.shares[0].devices.start)


def devices_in_use_or_free(view: Snapshot) -> dict[Kind, int]:
    """Devices of each kind that are free or held: what a policy that deals anew has to deal."""
    there = dict(view.occupancy.free_devices)
    for job in view.running():
        assert job.desired is not None
        for kind, count in view.cluster.groups_of(job.desired):
            there[kind] += count
    return there


@runtime_checkable
class KnowsAlike(Protocol):
    """An estimator that can tell which jobs it takes to be alike."""

    def alike(self, spec: JobSpec) -> Hashable:
        """What its answers about a job by itself depend on: rates in any place without neighbours, memory, batches.

        Two jobs with equal answers, or one job with equal answers at two times, are believed to be equally fast
        everywhere, as long as they ask for equally many devices. Asking is quick.
        """
        ...


def similarity_keys(estimates: Estimator, specs: list[JobSpec]) -> list[Hashable]:
    """What the estimator's answers depend on for each job; the job itself where it does not say."""
    if isinstance(estimates, KnowsAlike):
        alike = estimates.alike
        return [alike(spec) for spec in specs]
    return [spec.id for spec in specs]


@runtime_checkable
class KnowsUse(Protocol):
    """An estimator that can also tell what a job uses of a device."""

    def use(self, spec: JobSpec, kind: Kind) -> Use:
        """Shares kept busy on a device of that kind, at the job's own batch size."""
        ...


@runtime_checkable
class KnowsMemory(Protocol):
    """An estimator that can also tell how much memory a job needs."""

    def memory(self, spec: JobSpec) -> int:
        """Bytes on each of its devices at its own batch size; 0: unknown."""
        ...


def memory_of(estimates: Estimator, spec: JobSpec) -> int:
    """What a job declares, else what the estimator believes; 0: unknown."""
    if spec.memory_bytes or not isinstance(estimates, KnowsMemory):
        return spec.memory_bytes
    return estimates.memory(spec)


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
