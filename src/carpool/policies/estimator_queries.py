"""Queries to the estimator shared by policies: rates, memory, utilization, goodput and similarity of jobs."""

from __future__ import annotations

from collections.abc import Sequence

from carpool.core.estimates import Estimator, Goodput
from carpool.core.model import Job, JobSpec, Kind
from carpool.core.policy import Snapshot
from carpool.core.topology import Cluster, Placement


def placed_on(cluster: Cluster, kind: Kind, count: int) -> Placement:
    """A placement of `count` devices of one type on as few nodes as possible."""
    whole, rest = divmod(count, cluster.node_size[kind])
    full = ((kind, cluster.node_size[kind]),) * whole
    return Placement(((kind, rest), *full) if rest else full)


def rate_on(view: Snapshot, spec: JobSpec, kind: Kind, count: int = 0) -> float:
    """Estimated rate on `count` devices of a type, by default as many as requested."""
    return view.estimates.rate(spec, placed_on(view.cluster, kind, count or spec.devices)).mean


def kinds_of(view: Snapshot, spec: JobSpec, count: int = 0) -> list[Kind]:
    """Device types the job may use that have enough devices and memory, in the job's order, else the cluster's."""
    capacity, least, width = view.cluster.capacity, view.cluster.least_memory, count or spec.devices
    return [
        kind
        for kind in spec.kinds or capacity
        if capacity.get(kind, 0) >= width and not 0 < least.get(kind, 0) < spec.memory_bytes
    ]


def by_rate(view: Snapshot, spec: JobSpec, count: int = 0) -> list[tuple[float, Kind]]:
    """(rate, type) for every device type the job may use, fastest first, ties in the cluster's order."""
    rates = [(rate_on(view, spec, kind, count), kind) for kind in kinds_of(view, spec, count)]
    return sorted(rates, key=lambda pair: -pair[0])


def best_rate(view: Snapshot, spec: JobSpec) -> float:
    """The rate on the fastest device type; 0 when the job fits nowhere."""
    return max([rate_on(view, spec, kind) for kind in kinds_of(view, spec)], default=0.0)


def seconds_left(view: Snapshot, job: Job, rate: float) -> float:
    """Remaining work over a rate; infinite if unknown or the rate is 0."""
    return view.estimates.remaining(job, view.at).mean / rate if rate > 0.0 else float("inf")


def kind_held(view: Snapshot, job: Job) -> Kind | None:
    """The type of the first device a job holds."""
    return None if job.desired is None else view.cluster.kind_of(job.desired.shares[0].devices.start)


def devices_in_use_or_free(view: Snapshot) -> dict[Kind, int]:
    """Free and held devices of each type: those that a policy which reassigns everything can use."""
    there = dict(view.occupancy.free_devices)
    for job in view.running():
        assert job.desired is not None
        for kind, count in view.cluster.groups_of(job.desired):
            there[kind] += count
    return there


def memory_of(estimates: Estimator, spec: JobSpec) -> int:
    """Memory that a job declares, else the estimate; 0: unknown."""
    return spec.memory_bytes or estimates.memory(spec)


def worth_of_step(estimates: Estimator, spec: JobSpec, batch_size: int) -> float:
    """Factor that makes a rate at a batch size comparable with one at the job's own."""
    return 1.0 if not batch_size or batch_size == spec.batch_size else estimates.progress(spec, batch_size)


def goodputs(
    view: Snapshot, spec: JobSpec, kind: Kind, counts: Sequence[int], several: Sequence[bool]
) -> Sequence[Goodput]:
    """Best rate and batch size by number of devices; without batch tuning, rates at the job's own batch size."""
    if view.estimates.tunes_batches:
        return view.estimates.goodputs(spec, counts, several)
    found: list[Goodput] = []
    for count, spans in zip(counts, several, strict=True):
        placement = placed_on(view.cluster, kind, count)
        if spans and len(placement.groups) == 1:
            placement = Placement(((kind, count // 2), (kind, count - count // 2)))
        found.append((view.estimates.rate(spec, placement).mean, 0))
    return found
