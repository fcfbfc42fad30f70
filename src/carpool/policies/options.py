"""What each job may take: numbers of devices of each kind, and the rates believed of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from carpool.core.model import Allocation, Job, JobSpec, Kind
from carpool.core.policy import Snapshot
from carpool.core.topology import Cluster, Placement
from carpool.policies.goodput import KnowsGoodput
from carpool.policies.speeds import placed_on

Floats = NDArray[np.float64]

_FEW = 16  # devices in all, up to which jobs may also span unlike kinds
_FINE = 12  # every number of devices up to this is an option, above it steps of an eighth


class Offer(NamedTuple):
    """Devices of each kind, in the order of the cluster's kinds, zeros left out."""

    groups: tuple[tuple[Kind, int], ...]

    @property
    def count(self) -> int:
        """Devices in all."""
        return sum([count for _, count in self.groups])

    def words(self) -> str:
        """Such as ``3 V100``."""
        return " and ".join([f"{count} {kind}" for kind, count in self.groups])


class Answer(NamedTuple):
    """Rate and batch size of an option; how sure they are."""

    rate: float
    batch_size: int = 0  # 0: the job's own
    is_sure: bool = True


NOT = Answer(0.0)


@dataclass(frozen=True, slots=True)
class Menu:
    """Options in columns, jobs in rows."""

    jobs: Sequence[Job]
    offers: Sequence[Offer]
    kinds: Sequence[Kind]
    supply: Floats  # [kind] devices that are free or held by the jobs
    needs: Floats  # [offer, kind]
    rates: Floats  # [job, offer]
    batches: NDArray[np.int64]  # [job, offer]
    is_sure: NDArray[np.bool_]  # [job]: whether its rates are known and not believed
    held: NDArray[np.intp]  # [job]: the offer that has the shape of what it holds; -1: holds nothing
    stay_rates: Floats  # [job]: rate where it is
    cluster: Cluster

    def shape_of(self, allocation: Allocation) -> Offer:
        """The kinds and numbers of an allocation."""
        return shape_of(self.cluster, allocation)

    def is_tight(self, allocation: Allocation, shape: Offer) -> bool:
        """Whether an allocation is on as few nodes as its numbers allow."""
        return len(self.cluster.groups_of(allocation)) <= len(_tight(self.cluster, shape).groups)


def draw_up(view: Snapshot, jobs: Sequence[Job], tried: dict[str, int], growth: int) -> Menu:
    """The menu of all jobs. While rates are only believed, a job gets at most `growth` times what it has tried."""
    cluster = view.cluster
    kinds = cluster.kinds
    supply = np.array([float(count) for count in _there_is(view)])
    shapes = [None if job.desired is None else shape_of(cluster, job.desired) for job in jobs]
    offers = _offers(jobs, kinds, supply, shapes)
    places = {offer: place for place, offer in enumerate(offers)}
    needs = np.zeros((len(offers), len(kinds)))
    for offer, place in places.items():
        for kind, count in offer.groups:
            needs[place, kinds.index(kind)] = count
    rates = np.zeros((len(jobs), len(offers)))
    batches = np.zeros((len(jobs), len(offers)), np.int64)
    sure = np.ones(len(jobs), np.bool_)
    held = np.full(len(jobs), -1, np.intp)
    stay_rates = np.zeros(len(jobs))
    for row, (job, shape) in enumerate(zip(jobs, shapes, strict=True)):
        able = [
            place
            for offer, place in places.items()
            if _is_able(view, job, offer, supply[0] if len(kinds) == 1 else None)
        ]
        answers = ask(view, job.spec, [offers[place] for place in able])
        most = growth * max(tried.get(job.id, 0), job.spec.narrowest)
        for place, answer in zip(able, answers, strict=True):
            if answer.is_sure or offers[place].count <= most or shape == offers[place]:
                rates[row, place], batches[row, place] = answer.rate, answer.batch_size
            sure[row] &= answer.is_sure
        if shape is not None:
            assert job.desired is not None
            held[row] = places[shape]
            stay_rates[row] = rates[row, held[row]]
            if len(cluster.groups_of(job.desired)) > len(_tight(cluster, shape).groups):
                stay_rates[row] = ask_apart(view, job, shape).rate
    return Menu(jobs, offers, kinds, supply, needs, rates, batches, sure, held, stay_rates, cluster)


def shape_of(cluster: Cluster, allocation: Allocation) -> Offer:
    """The kinds and numbers of an allocation."""
    counts = dict.fromkeys(cluster.kinds, 0)
    for kind, count in cluster.groups_of(allocation):
        counts[kind] += count
    return Offer(tuple([(kind, count) for kind, count in counts.items() if count]))


def ask(view: Snapshot, spec: JobSpec, offers: Sequence[Offer]) -> Sequence[Answer]:
    """What the estimator believes of options on as few nodes as possible."""
    cluster, estimates = view.cluster, view.estimates
    if isinstance(estimates, KnowsGoodput):
        alike = [offer for offer in offers if len(offer.groups) == 1]
        several = [offer.count > cluster.node_size[offer.groups[0][0]] for offer in alike]
        found = estimates.goodputs(spec, [offer.count for offer in alike], several)
        known = {offer: Answer(rate, batch, is_sure=False) for offer, (rate, batch) in zip(alike, found, strict=True)}
        return [known.get(offer, NOT) for offer in offers]
    answers: list[Answer] = []
    for offer in offers:
        rate, spread = estimates.rate(spec, _tight(cluster, offer))
        answers.append(Answer(rate, 0, spread <= 0.0))
    return answers


def ask_apart(view: Snapshot, job: Job, offer: Offer) -> Answer:
    """The same where the devices have to be on more nodes than they need."""
    if isinstance(view.estimates, KnowsGoodput):
        ((rate, batch),) = view.estimates.goodputs(job.spec, [offer.count], [offer.count > 1])
        return Answer(rate, batch, is_sure=False)
    tight = _tight(view.cluster, offer).groups
    (kind, count), *others = tight
    groups = tuple(sorted([(kind, count // 2), (kind, count - count // 2), *others])) if count > 1 else tight
    return Answer(view.estimates.rate(job.spec, Placement(groups)).mean)


def _tight(cluster: Cluster, offer: Offer) -> Placement:
    """An offer on as few nodes as possible."""
    if len(offer.groups) == 1:
        return placed_on(cluster, *offer.groups[0])
    return Placement(tuple(sorted([part for group in offer.groups for part in placed_on(cluster, *group).groups])))


def _is_able(view: Snapshot, job: Job, offer: Offer, one_kind: float | None) -> bool:
    """Whether the job accepts so many devices of these kinds, and they have the memory."""
    spec = job.spec
    if not spec.narrowest <= offer.count <= spec.widest:
        return False
    if one_kind is not None and not spec.kinds and not spec.memory_bytes:
        return True
    allowed = view.kinds_for(job)
    return all(kind in allowed for kind, _ in offer.groups)


def _there_is(view: Snapshot) -> list[int]:
    """Devices of each kind on nodes that are not lost."""
    there = dict(view.cluster.capacity)
    for node in view.occupancy.lost:
        for bank in view.cluster.nodes[node].banks:
            there[bank.kind] -= len(bank.devices)
    return [there[kind] for kind in view.cluster.kinds]


def _offers(jobs: Sequence[Job], kinds: Sequence[Kind], supply: Floats, shapes: Sequence[Offer | None]) -> list[Offer]:
    """Every option that some job could use."""
    ranges = {(job.spec.narrowest, job.spec.widest) for job in jobs}
    found: dict[Offer, None] = {}
    for kind, there in zip(kinds, supply, strict=True):
        counts: set[int] = set()
        for low, high in ranges:
            counts |= _ladder(low, min(high, int(there)))
        found |= dict.fromkeys([Offer(((kind, count),)) for count in sorted(counts)])
    few = supply.sum() <= _FEW and prod(int(there) + 1 for there in supply) <= 4 * _FEW
    if len(kinds) > 1 and few and any(high > 1 for _, high in ranges):
        for counts_of in product(*[range(int(there) + 1) for there in supply]):
            groups = tuple([(kind, count) for kind, count in zip(kinds, counts_of, strict=True) if count])
            if len(groups) > 1 and any(low <= sum(counts_of) <= high for low, high in ranges):
                found[Offer(groups)] = None
    found |= dict.fromkeys([shape for shape in shapes if shape is not None])
    return list(found)


def _ladder(low: int, high: int) -> set[int]:
    """Numbers of devices between two, all of them while they are few, then in steps of an eighth, and the ends."""
    if high < low:
        return set()
    counts = {low, high}
    count = low
    while count < high:
        counts.add(count)
        count += max(1, count // 8 if count >= _FINE else 1)
    return counts
