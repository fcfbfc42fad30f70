"""What each job may take: numbers of devices of each kind, and the rates believed of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from carpool.core.estimates import Estimator
from carpool.core.model import Allocation, Job, JobId, Kind
from carpool.core.policy import Snapshot
from carpool.core.topology import Cluster, Placement
from carpool.policies.batch_tuning import best_alone, best_step, tunes_by_steps
from carpool.policies.goodput import KnowsGoodput, worth_of_step
from carpool.policies.knapsack import NONE, Floats
from carpool.policies.speeds import placed_on

Batches = NDArray[np.int64]

_FEW = 16  # devices in all, up to which jobs may also span unlike kinds
_FINE = 12  # every number of devices up to this is an option, above it steps of an eighth


class Offer(NamedTuple):
    """Devices of each kind, in the order of the cluster's kinds, zeros left out."""

    groups: tuple[tuple[Kind, int], ...]
    width: int  # devices in all

    @classmethod
    def of(cls, *groups: tuple[Kind, int]) -> Offer:
        """From (kind, count) pairs."""
        return cls(groups, sum([count for _, count in groups]))

    def words(self) -> str:
        """Such as ``3 V100``."""
        return " and ".join([f"{count} {kind}" for kind, count in self.groups])


class Answer(NamedTuple):
    """Rate and batch size of an option, and whether they are known or only believed."""

    rate: float
    batch_size: int = 0  # 0: the job's own
    is_sure: bool = True


class Known:
    """What the estimator has said, so that a plan asks only for what is new."""

    def __init__(self) -> None:
        self._asked: tuple[Estimator, int, Cluster] | None = None
        self.offers: list[Offer] = []
        self.rows: dict[JobId, tuple[Floats, Batches]] = {}  # by offer, of jobs that are sure of their rates
        self.ratios: dict[object, float] = {}  # see `parties`

    def keep_for(self, estimates: Estimator, cluster: Cluster, num_jobs: int) -> None:
        """Begin anew if it is another estimator, or it has learned, or the cluster has grown, or too much is kept."""
        asked = (estimates, estimates.version, cluster)
        before = self._asked
        same = before is not None and all(new is old or new == old for new, old in zip(asked, before, strict=True))
        if not same or len(self.rows) > 2 * num_jobs + 100:
            self._asked = asked
            self.rows.clear()
            self.ratios.clear()


@dataclass(frozen=True, slots=True)
class Menu:
    """Jobs in rows, offers in columns."""

    jobs: Sequence[Job]
    offers: Sequence[Offer]
    cluster: Cluster
    supply: Floats  # [kind] devices there are
    needs: Floats  # [offer, kind]
    rates: Floats  # [job, offer]
    batches: Batches  # [job, offer]: the best there, 0: the job's own
    is_sure: NDArray[np.bool_]  # [job]: whether its rates are known and not only believed
    held: NDArray[np.intp]  # [job]: the offer that has the shape of what it holds, or NONE
    stay_rates: Floats  # [job]: rate where it is

    def is_tight(self, allocation: Allocation, shape: Offer) -> bool:
        """Whether an allocation is on as few nodes as its numbers allow."""
        return len(self.cluster.groups_of(allocation)) <= len(_tight(self.cluster, shape).groups)


class Caution(NamedTuple):
    """How far jobs are let go while rates are only believed."""

    growth: int  # times the devices, or the batch, that a job has tried
    trust: float  # times better than what a job has another batch must be
    tunes: bool  # whether batch sizes are chosen too


def draw_up(view: Snapshot, jobs: Sequence[Job], tried: dict[JobId, int], caution: Caution, known: Known) -> Menu:
    """The menu of all jobs. While rates are only believed, a job gets at most `growth` times what it has tried.

    Of one that has never run nothing is known but what it declares: it gets no more than an equal share.
    """
    shapes = [None if job.desired is None else shape_of(view.cluster, job.desired) for job in jobs]
    menu = _blank(view, jobs, shapes)
    if menu.offers != known.offers:
        known.offers = list(menu.offers)
        known.rows.clear()
    equal_share = int(menu.supply.sum()) // len(jobs)
    for row, job in enumerate(jobs):
        said = known.rows.get(job.spec.id)
        if said is not None:
            menu.rates[row], menu.batches[row] = said
        else:
            narrowest = job.spec.narrowest
            most = caution.growth * max(tried.get(job.id, 0), narrowest)
            if job.id not in tried:
                most = min(most, max(equal_share, narrowest))
            _ask_for(view, menu, row, most, caution)
            if menu.is_sure[row]:
                known.rows[job.spec.id] = menu.rates[row].copy(), menu.batches[row].copy()
        shape = shapes[row]
        if shape is not None:
            assert job.desired is not None
            tight = len(job.desired.shares) == 1 or menu.is_tight(job.desired, shape)
            menu.stay_rates[row] = menu.rates[row, menu.held[row]] if tight else ask_apart(view, job, shape).rate
    return menu


def shape_of(cluster: Cluster, allocation: Allocation) -> Offer:
    """The kinds and numbers of an allocation."""
    if len(allocation.shares) == 1:
        run = allocation.shares[0].devices
        bank = cluster.bank_of(run.start)
        if run.stop <= bank.devices.stop:  # nearly always
            return Offer(((bank.kind, len(run)),), len(run))
    counts = dict.fromkeys(cluster.kinds, 0)
    for kind, count in cluster.groups_of(allocation):
        counts[kind] += count
    return Offer.of(*[(kind, count) for kind, count in counts.items() if count])


def ask_apart(view: Snapshot, job: Job, offer: Offer) -> Answer:
    """What is believed of devices that have to be on more nodes than they need."""
    if isinstance(view.estimates, KnowsGoodput):
        ((rate, batch),) = view.estimates.goodputs(job.spec, [offer.width], [offer.width > 1])
        return Answer(rate, batch, is_sure=False)
    tight = _tight(view.cluster, offer).groups
    (kind, count), *others = tight
    groups = tuple(sorted([(kind, count // 2), (kind, count - count // 2), *others])) if count > 1 else tight
    return Answer(view.estimates.rate(job.spec, Placement(groups)).mean)


# --------------------------------------------------------------------------------------------------------- pieces
def _blank(view: Snapshot, jobs: Sequence[Job], shapes: Sequence[Offer | None]) -> Menu:
    """A menu without rates."""
    kinds = view.cluster.kinds
    supply = np.array([float(count) for count in _there_is(view)])
    offers = _offers(jobs, kinds, supply, shapes)
    places = {offer: place for place, offer in enumerate(offers)}
    needs = np.zeros((len(offers), len(kinds)))
    for offer, place in places.items():
        for kind, count in offer.groups:
            needs[place, kinds.index(kind)] = count
    return Menu(
        jobs,
        offers,
        view.cluster,
        supply,
        needs,
        rates=np.zeros((len(jobs), len(offers))),
        batches=np.zeros((len(jobs), len(offers)), np.int64),
        is_sure=np.ones(len(jobs), np.bool_),
        held=np.array([NONE if shape is None else places[shape] for shape in shapes], np.intp),
        stay_rates=np.zeros(len(jobs)),
    )


def _ask_for(view: Snapshot, menu: Menu, row: int, most: int, caution: Caution) -> None:
    """Fill in one job's row."""
    job = menu.jobs[row]
    spec, allowed = job.spec, view.kinds_for(job)
    able = [
        place
        for place, offer in enumerate(menu.offers)
        if spec.narrowest <= offer.width <= spec.widest and all(kind in allowed for kind, _ in offer.groups)
    ]
    answers = _ask(view, job, [menu.offers[place] for place in able], caution)
    for place, answer in zip(able, answers, strict=True):
        if answer.is_sure or menu.offers[place].width <= most or place == menu.held[row]:
            menu.rates[row, place], menu.batches[row, place] = answer.rate, answer.batch_size
        menu.is_sure[row] &= answer.is_sure


def _ask(view: Snapshot, job: Job, offers: Sequence[Offer], caution: Caution) -> Sequence[Answer]:
    """What the estimator believes of offers on as few nodes as possible, each with the best batch if that is tuned."""
    cluster, estimates, spec = view.cluster, view.estimates, job.spec
    if caution.tunes and isinstance(estimates, KnowsGoodput):
        alike = [offer for offer in offers if len(offer.groups) == 1]
        several = [offer.width > cluster.node_size[offer.groups[0][0]] for offer in alike]
        found = estimates.goodputs(spec, [offer.width for offer in alike], several)
        known = {offer: Answer(rate, batch, is_sure=False) for offer, (rate, batch) in zip(alike, found, strict=True)}
        return [known.get(offer, Answer(0.0)) for offer in offers]
    answers: list[Answer] = []
    for offer in offers:
        place, batch = _tight(cluster, offer), 0
        if caution.tunes and spec.batch_range is not None:
            batch = _batch(view, job, offer, place, caution)
        rate, spread = estimates.rate(spec, replace(place, batch_size=batch) if batch else place)
        answers.append(Answer(rate * worth_of_step(estimates, spec, batch), batch, spread <= 0.0))
    return answers


def _batch(view: Snapshot, job: Job, offer: Offer, place: Placement, caution: Caution) -> int:
    """The best batch for an offer, from what is known of batches; 0: the job's own."""
    capacity = min([view.cluster.least_memory.get(kind, 0) for kind, _ in offer.groups])
    if tunes_by_steps(view.estimates, job):
        return best_step(view.estimates, job, place, capacity, growth=caution.growth, trust=caution.trust)
    return best_alone(view.estimates, job, offer.groups[0][0], capacity) if offer.width == 1 else 0


def _tight(cluster: Cluster, offer: Offer) -> Placement:
    """An offer on as few nodes as possible."""
    if len(offer.groups) == 1:
        return placed_on(cluster, *offer.groups[0])
    return Placement(tuple(sorted([part for group in offer.groups for part in placed_on(cluster, *group).groups])))


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
        found |= dict.fromkeys([Offer.of((kind, count)) for count in sorted(counts)])
    few = supply.sum() <= _FEW and prod(int(there) + 1 for there in supply) <= 4 * _FEW
    if len(kinds) > 1 and few and any(high > 1 for _, high in ranges):
        for counts_of in product(*[range(int(there) + 1) for there in supply]):
            groups = [(kind, count) for kind, count in zip(kinds, counts_of, strict=True) if count]
            if len(groups) > 1 and any(low <= sum(counts_of) <= high for low, high in ranges):
                found[Offer.of(*groups)] = None
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
