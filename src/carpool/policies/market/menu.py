"""Menu of options per job: device counts of each type with estimated rates and batch sizes."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from carpool.core.model import Allocation, Job, JobId, Kind
from carpool.core.policy import Snapshot
from carpool.core.topology import Cluster, Placement
from carpool.policies.estimator_queries import placed_on, worth_of_step
from carpool.policies.iadeep.batch_tuning import best_alone, best_step, tunes_by_steps
from carpool.policies.market.knapsack import NONE, Floats
from carpool.policies.market.policy_memory import Batches, EstimateCache, Held, Offer, Row
from carpool.policies.market.prices import Places

_FEW = 16  # devices in the cluster up to which jobs may also span device types
_SPARE = 64  # cached entries beyond twice the jobs, before those of ended jobs are dropped
_FINE = 12  # up to this every device count is an option, above it steps of an eighth


class OptionRate(NamedTuple):
    """Rate and batch size of an option, and whether they are certain."""

    rate: float
    batch_size: int = 0  # 0: the job's own
    is_sure: bool = True


@dataclass(frozen=True, slots=True)
class Menu:
    """Options of all jobs: jobs in rows, offers in columns."""

    jobs: Sequence[Job]
    offers: Sequence[Offer]
    cluster: Cluster
    supply: Floats  # [kind] existing devices
    needs: Floats  # [offer, kind]
    rates: Floats  # [job, offer]
    batches: Batches  # [job, offer]: the best there, 0: the job's own
    is_sure: NDArray[np.bool_]  # [job]: whether all its rates are certain
    held: NDArray[np.intp]  # [job]: the offer it holds, or NONE
    stay_rates: Floats  # [job]: its rate on the devices it holds

    def is_tight(self, allocation: Allocation, shape: Offer) -> bool:
        return _is_tight(self.cluster, allocation, shape)


class GrowthLimits(NamedTuple):
    """Limits on changes while rates are estimates."""

    growth: int  # factor on the devices, or the batch size, that a job has tried
    trust: float  # factor by which another batch size must be better
    tunes: bool  # whether to choose batch sizes


def build_menu(
    view: Snapshot, jobs: Sequence[Job], tried: dict[JobId, int], limits: GrowthLimits, known: EstimateCache
) -> Menu:
    """Build the menu of all jobs. While rates are estimates, a job gets at most `growth` times what it has tried.

    A job that has never run gets at most an equal share of the devices, and its least number while not even the scale
    of its rates is known: more devices may be slower.
    """
    likes = [view.estimates.similarity_key(job.spec) for job in jobs]
    holdings = _holdings(view, jobs, likes, known)
    supply = np.array([float(view.occupancy.usable_devices[kind]) for kind in view.cluster.kinds])
    of, examples = _alike(jobs, likes, known)
    ranges = {(job.spec.narrowest, job.spec.widest) for job in examples.values()}
    offers = _offers(ranges, view.cluster.kinds, supply, [holding.shape for holding in holdings if holding is not None])
    places = {offer: place for place, offer in enumerate(offers)}
    held = np.array([NONE if holding is None else places[holding.shape] for holding in holdings], np.intp)
    rows = _rows(view, examples, offers, limits, known)
    rates = np.array([row.rates for row in rows])[of]
    menu = Menu(
        jobs,
        offers,
        view.cluster,
        supply,
        _needs(offers, view.cluster.kinds),
        rates,
        np.array([row.batches for row in rows])[of],
        is_sure=np.array([row.is_sure for row in rows])[of],
        held=held,
        stay_rates=np.zeros(len(jobs)),
    )
    if not menu.is_sure.all():
        _hold_back(view, menu, np.array([row.is_guess for row in rows])[of], tried, limits.growth)
    runs = np.flatnonzero(held != NONE)
    menu.stay_rates[runs] = rates[runs, held[runs]]
    for row in runs.tolist():
        if (holding := holdings[row]) is not None and holding.spread_rate is not None:
            menu.stay_rates[row] = holding.spread_rate
    return menu


def shape_of(cluster: Cluster, allocation: Allocation) -> Offer:
    """Device types and counts of an allocation."""
    if len(allocation.shares) == 1:
        run = allocation.shares[0].devices
        bank = cluster.bank_of(run.start)
        if run.stop <= bank.devices.stop:  # nearly always
            return Offer(((bank.kind, len(run)),), len(run))
    counts = dict.fromkeys(cluster.kinds, 0)
    for kind, count in cluster.groups_of(allocation):
        counts[kind] += count
    return Offer.of(*[(kind, count) for kind, count in counts.items() if count])


def rate_when_spread(view: Snapshot, job: Job, offer: Offer) -> OptionRate:
    """The estimated rate on devices spread over more nodes than necessary."""
    if view.estimates.tunes_batches:
        ((rate, batch),) = view.estimates.goodputs(job.spec, [offer.width], [offer.width > 1])
        return OptionRate(rate, batch, is_sure=False)
    tight = _tight(view.cluster, offer).groups
    (kind, count), *others = tight
    groups = tuple(sorted([(kind, count // 2), (kind, count - count // 2), *others])) if count > 1 else tight
    path = view.cluster.fastest_path() if len(groups) > 1 else None
    return OptionRate(view.estimates.rate(job.spec, Placement(groups, path=path)).mean)


def rate_on_nodes(view: Snapshot, job: Job, held: Allocation) -> float:
    """The estimated rate on whole devices, over the links between their nodes."""
    placement = view.cluster.placement(held)
    return view.estimates.rate(job.spec, Placement(placement.groups, 1.0, held.batch_size, path=placement.path)).mean


def _holdings(
    view: Snapshot, jobs: Sequence[Job], likes: Sequence[Hashable], known: EstimateCache
) -> list[Held | None]:
    """What each running job holds, cached between plans."""
    holdings = known.holdings
    found: list[Held | None] = [None] * len(jobs)
    for row, job in enumerate(jobs):
        held = job.desired
        if held is None:
            continue
        name = job.spec.id
        holding = holdings.get(name)
        if holding is None or holding.allocation is not held or holding.like != likes[row]:
            holding = holdings[name] = _holding(view, job, held, likes[row])
        found[row] = holding
    if len(holdings) > 2 * len(jobs) + _SPARE:
        known.holdings = {job.spec.id: each for job, each in zip(jobs, found, strict=True) if each is not None}
    return found


def _holding(view: Snapshot, job: Job, held: Allocation, like: Hashable) -> Held:
    shape = shape_of(view.cluster, held)
    if view.cluster.links and not view.estimates.tunes_batches and len(view.cluster.nodes_of(held)) > 1:
        return Held(held, like, shape, rate_on_nodes(view, job, held))
    tight = len(held.shares) == 1 or _is_tight(view.cluster, held, shape)
    return Held(held, like, shape, None if tight else rate_when_spread(view, job, shape).rate)


def _alike(jobs: Sequence[Job], likes: Sequence[Hashable], known: EstimateCache) -> tuple[Places, dict[Hashable, Job]]:
    """The index of each job among jobs with distinct rows, and those jobs by key."""
    places: dict[Hashable, int] = {}
    examples: dict[Hashable, Job] = {}
    found: list[int] = []
    asks = known.asks
    if len(asks) > 2 * len(jobs) + _SPARE:
        active = {job.spec.id for job in jobs}
        known.asks = asks = {name: ask for name, ask in asks.items() if name in active}
    for job, like in zip(jobs, likes, strict=True):
        spec = job.spec
        ask = asks.get(spec.id)
        if ask is None or ask.spec is not spec:
            ask = asks[spec.id] = known.ask_of(spec)
        key: Hashable = (like, ask.number)
        if ask.tunes and job.desired is not None and job.desired.batch_size:
            key = (like, ask.number, job.desired.batch_size)
        place = places.get(key)
        if place is None:
            place = places[key] = len(places)
            examples[key] = job
        found.append(place)
    return np.array(found, np.intp), examples


def _rows(
    view: Snapshot, examples: dict[Hashable, Job], offers: list[Offer], limits: GrowthLimits, known: EstimateCache
) -> Sequence[Row]:
    """Estimates for jobs with distinct rows, cached between plans."""
    before = known.rows if offers == known.offers else {}
    known.offers = offers
    query = _RateQuery(view, offers, limits)
    known.rows = {key: before.get(key) or query.row(job) for key, job in examples.items()}
    return list(known.rows.values())


def _hold_back(view: Snapshot, menu: Menu, is_guess: NDArray[np.bool_], tried: dict[JobId, int], growth: int) -> None:
    """Remove options that jobs with estimated rates may not have yet.

    `is_guess` is [job, offer]; rows of certain jobs have no guesses.
    """
    narrowest = np.array([job.spec.narrowest for job in menu.jobs])
    is_new = np.array([not view.estimates.knows_scale(job.spec) for job in menu.jobs])
    equal_share = int(menu.supply.sum()) // len(menu.jobs)
    most = np.minimum(growth * narrowest, np.maximum(equal_share, narrowest))
    for row, job in enumerate(menu.jobs):
        if job.spec.id in tried:
            most[row] = growth * max(tried[job.spec.id], job.spec.narrowest)
    most[is_new] = narrowest[is_new]
    widths = np.array([offer.width for offer in menu.offers])
    struck = is_guess & (widths > most[:, None])
    holds = np.flatnonzero(menu.held != NONE)
    struck[holds, menu.held[holds]] = False
    menu.rates[struck] = 0.0
    menu.batches[struck] = 0


def _needs(offers: Sequence[Offer], kinds: Sequence[Kind]) -> Floats:
    needs = np.zeros((len(offers), len(kinds)))
    for place, offer in enumerate(offers):
        for kind, count in offer.groups:
            needs[place, kinds.index(kind)] = count
    return needs


class _RateQuery:
    """Queries estimates for offers on as few nodes as possible, each with the best batch size if tuned.

    Caches what is the same for all jobs, since a plan may query thousands.
    """

    def __init__(self, view: Snapshot, offers: Sequence[Offer], limits: GrowthLimits) -> None:
        self._view = view
        self._offers = offers
        self._caution = limits
        self._places = [_tight(view.cluster, offer) for offer in offers]
        self._asks_goodputs = view.estimates.tunes_batches and limits.tunes
        self._able: dict[tuple[object, ...], list[int]] = {}

    def row(self, job: Job) -> Row:
        able = self._able_for(job)
        rates, batches = np.zeros(len(self._offers)), np.zeros(len(self._offers), np.int64)
        is_guess = np.zeros(len(self._offers), np.bool_)
        answers = self._ask_goodputs(job, able) if self._asks_goodputs else self._ask(job, able)
        if not answers:
            return Row(rates, batches, is_guess, is_sure=True)
        found, chosen, sure = zip(*answers, strict=True)
        rates[able] = found
        if any(chosen):
            batches[able] = chosen
        is_sure = all(sure)
        if not is_sure:
            is_guess[able] = np.logical_not(sure)
        return Row(rates, batches, is_guess, is_sure)

    def _able_for(self, job: Job) -> list[int]:
        """Offers of a size and device types that the job may use."""
        spec, allowed = job.spec, self._view.kinds_for(job)
        key = (spec.narrowest, spec.widest, *allowed)
        if key not in self._able:
            self._able[key] = [
                place
                for place, offer in enumerate(self._offers)
                if spec.narrowest <= offer.width <= spec.widest and all(kind in allowed for kind, _ in offer.groups)
            ]
        return self._able[key]

    def _ask_goodputs(self, job: Job, able: Sequence[int]) -> Sequence[OptionRate]:
        """Query an estimator that tunes batch sizes itself."""
        offers, size = [self._offers[place] for place in able], self._view.cluster.node_size
        alike = [offer for offer in offers if len(offer.groups) == 1]
        several = [offer.width > size[offer.groups[0][0]] for offer in alike]
        found = self._view.estimates.goodputs(job.spec, [offer.width for offer in alike], several)
        known = {
            offer: OptionRate(rate, batch, is_sure=False) for offer, (rate, batch) in zip(alike, found, strict=True)
        }
        return [known.get(offer, OptionRate(0.0)) for offer in offers]

    def _ask(self, job: Job, able: Sequence[int]) -> Sequence[OptionRate]:
        estimates, spec = self._view.estimates, job.spec
        if not self._caution.tunes or spec.batch_range is None:
            found = [estimates.rate(spec, self._places[place]) for place in able]
            return [OptionRate(rate, 0, spread <= 0.0) for rate, spread in found]
        answers: list[OptionRate] = []
        for option in able:
            place = self._places[option]
            batch = _batch(self._view, job, self._offers[option], place, self._caution)
            rate, spread = estimates.rate(spec, replace(place, batch_size=batch) if batch else place)
            answers.append(OptionRate(rate * worth_of_step(estimates, spec, batch), batch, spread <= 0.0))
        return answers


def _batch(view: Snapshot, job: Job, offer: Offer, place: Placement, limits: GrowthLimits) -> int:
    """The best batch size for an offer; 0: the job's own."""
    capacity = min([view.cluster.least_memory.get(kind, 0) for kind, _ in offer.groups])
    if tunes_by_steps(view.estimates, job):
        return best_step(view.estimates, job, place, capacity, growth=limits.growth, trust=limits.trust)
    return best_alone(view.estimates, job, offer.groups[0][0], capacity) if offer.width == 1 else 0


def _is_tight(cluster: Cluster, allocation: Allocation, shape: Offer) -> bool:
    return len(cluster.groups_of(allocation)) <= len(_tight(cluster, shape).groups)


def _tight(cluster: Cluster, offer: Offer) -> Placement:
    """An offer on as few nodes as possible, over the fastest link."""
    if len(offer.groups) == 1:
        placement = placed_on(cluster, *offer.groups[0])
    else:
        parts = [part for group in offer.groups for part in placed_on(cluster, *group).groups]
        placement = Placement(tuple(sorted(parts)))
    if len(placement.groups) > 1 and (path := cluster.fastest_path()) is not None:
        return replace(placement, path=path)
    return placement


def _offers(
    ranges: set[tuple[int, int]], kinds: Sequence[Kind], supply: Floats, shapes: Iterable[Offer]
) -> list[Offer]:
    """All device counts and types that some job could use, and those that jobs hold."""
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
    found |= dict.fromkeys(shapes)
    return list(found)


def _ladder(low: int, high: int) -> set[int]:
    """Device counts between two numbers: all small ones, then steps of an eighth, and both ends."""
    if high < low:
        return set()
    counts = {low, high}
    count = low
    while count < high:
        counts.add(count)
        count += max(1, count // 8 if count >= _FINE else 1)
    return counts
