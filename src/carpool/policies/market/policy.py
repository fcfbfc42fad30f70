"""Market policies `carpool` (the default) and `elastic`: devices go where they save most weighted completion time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from carpool.core.draft import Draft
from carpool.core.errors import InputError, UnknownName
from carpool.core.estimates import Estimator
from carpool.core.model import Job
from carpool.core.policy import Plan, Policy, Snapshot
from carpool.policies.market.colocation_groups import ColocationGroups, form_groups
from carpool.policies.market.knapsack import NONE, InputPlan, solve_knapsack
from carpool.policies.market.menu import GrowthLimits, Menu, build_menu, shape_of
from carpool.policies.market.placement import place_all
from carpool.policies.market.policy_memory import EstimateCache, Offer, PolicyMemory
from carpool.policies.market.prices import Floats, Market, ends, relative_prices
from carpool.policies.registry import register


def moves_s(estimates: Estimator, jobs: Sequence[Job], otherwise: float) -> NDArray[np.float64]:
    """What the estimator says of the moves of each job that holds something, else a guess."""
    told = [None if job.desired is None else estimates.move_s(job.spec) for job in jobs]
    return np.array([otherwise if seconds is None else seconds for seconds in told])


_ORDINALS = ("", "first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")


def join_words(menu: Menu, prices: Floats) -> str:
    """Such as ``0.04 for a V100 and 0.01 for a K80``."""
    return " and ".join(
        [f"{format_price(price)} for a {kind}" for kind, price in zip(menu.cluster.kinds, prices, strict=True)]
    )


def format_price(price: float) -> str:
    """A price in two digits; one that is as good as none is 0."""
    return f"{price:.2g}" if price >= 1e-4 else "0"


def explain_holding(menu: Menu, market: Market, prices: Floats, row: int, offer: Offer) -> str:
    """Such as ``holds 3 V100 at price 0.04; a fourth would save 210 s and cost 260 s``."""
    kind, count = offer.groups[0]
    price = float(prices[menu.cluster.kinds.index(kind)])
    told = f"holds {offer.words()} at price {format_price(price)}"
    column = menu.offers.index(offer)
    more = _next(menu, row, offer)
    if more is None or not menu.rates[row, column]:
        return told
    now_s, then_s = market.work[row] * market.per_unit[row, [column, more]]
    saved = float(market.weights[row] * (now_s - then_s))
    extra = menu.offers[more].width
    cost = max(0.0, price * (extra * then_s - count * now_s))
    word = f"a {_ORDINALS[extra]}" if extra == count + 1 and extra < len(_ORDINALS) else f"{extra - count} more"
    if saved <= 0.0:
        return f"{told}; {word} would not make it faster"
    return f"{told}; {word} would save {_seconds(saved)} and cost {_seconds(cost)}"


def explain_waiting(menu: Menu, worths: Floats, prices: Floats, row: int) -> str:
    """Such as ``waits: 2 V100 cost 0.9 each, it would pay 0.4``."""
    costs = menu.needs @ prices
    worth = worths[row] * menu.rates[row]
    if not worth.any():
        return "waits: nothing that is there can run it"
    best = int(np.where(worth > 0.0, worth - costs, -np.inf).argmax())
    offer = menu.offers[best]
    price, pays = costs[best] / offer.width, worth[best] / offer.width
    each = " each" if offer.width > 1 else ""
    if pays >= price:
        return f"waits although it would pay {format_price(pays)} for {offer.words()} at {format_price(price)}: they cannot be had now"
    return f"waits: {offer.words()} cost{'' if each else 's'} {format_price(price)}{each}, it would pay {format_price(pays)}"


def explain_job(menu: Menu, market: Market, worths: Floats, prices: Floats, job: Job) -> str:
    """The sentence for one job as it stands."""
    row = next(row for row, other in enumerate(menu.jobs) if other.id == job.id)
    if job.desired is None:
        return explain_waiting(menu, worths, prices, row)
    told = explain_holding(menu, market, prices, row, shape_of(menu.cluster, job.desired))
    if job.desired.batch_size not in (0, job.spec.batch_size):
        told += f"; its batch is {job.desired.batch_size}"
    return told if job.desired.fractions == (1.0,) else f"{told}; it shares them"


def _next(menu: Menu, row: int, offer: Offer) -> int | None:
    """The next larger offer of the same kind that the job could use."""
    if len(offer.groups) > 1:
        return None
    kind = offer.groups[0][0]
    larger = [
        (other.width, column)
        for column, other in enumerate(menu.offers)
        if len(other.groups) == 1
        and other.groups[0][0] == kind
        and other.width > offer.width
        and menu.rates[row, column] > 0.0
    ]
    return min(larger)[1] if larger else None


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10.0 or seconds == 0.0 else f"{seconds:.2g} s"


_WITH_PARTIES = 0.6  # how far prices may fall because jobs share
_ROUNDS = 2  # of prices and the order of ends, which depend on each other
_REPLACED = 0.5  # the part of leavers that is replaced by arrivals, where there are arrivals
_STAYS = 1.02  # what a job has counts for so much more: ties move nobody
_LEAST = 0.01  # of a job's value is left however dear a move
_TINY = 1e-9  # work that is as good as none
_YOUNG_S = 300.0  # what a job of which nothing is known is taken to need at least
_TOLD = 2  # jobs that a plan's reason speaks of by name


class Quote(NamedTuple):
    """A menu with its prices."""

    menu: Menu
    market: Market
    prices: Floats  # [kind]
    worths: Floats  # [job]: λ


@register("carpool")
@dataclass(frozen=True, slots=True)
class Carpool(Policy):
    """Prices for devices, a worth for every job's work, and an exact deal at the margin (`prices`, `knapsack`).

    The value of an option is λ_j · g_j(o). Whoever moves loses the standstill: the value is multiplied by (h − move)/h,
    h the rest of the job, at most `horizon_s`; whoever stays saves the move. While rates are only believed, staying
    counts `trust` times, and no job gets more than `growth` times the devices it has tried. A job of unknown length is
    taken to be half done, and at least young. Weights grow with waiting, so that nobody waits for ever. Jobs that pay
    more together than apart share devices (`parties`).

    With `objective` makespan a job's weight is the time it needs at best, and what others inherit does not count: the
    longest come first, each where it is quickest by comparison.
    """

    shares_devices: ClassVar[bool] = True
    tunes: ClassVar[bool] = True  # whether batch sizes are chosen too, where jobs allow it

    objective: str = "jct"
    lengths: str = "known"
    together: int = 2  # most jobs on one device
    growth: int = 4
    trust: float = 1.1
    move_s: float = 0.1  # where the estimator does not say
    horizon_s: float = 1000.0
    patience_s: float = 86400.0  # a job that has waited so long counts twice, after twice that three times …
    interval_s: float = 60.0  # looks again after so long, or up to four times as often, while rates are only believed
    _memo: EstimateCache = field(default_factory=EstimateCache, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check the ranges."""
        for name, value, words in (
            ("objective", self.objective, ("jct", "makespan")),
            ("lengths", self.lengths, ("known", "unknown")),
        ):
            if value not in words:
                raise UnknownName(name, value, words)
        if self.growth < 2:
            raise InputError(f"growth is {self.growth}", way_out="Give 2 or more, or jobs never get more devices.")
        if self.together < 1 or self.trust < 1.0 or self.patience_s <= 0.0:
            raise InputError(
                f"together {self.together}, trust {self.trust} or patience_s {self.patience_s} is too small",
                way_out="Such as carpool:together=2:trust=1.1:patience_s=86400.",
            )

    def plan(self, view: Snapshot) -> Plan:
        """Find prices, deal devices out, move whom that moves."""
        experience = PolicyMemory.of(view)
        before = experience.outlook
        quote = self._quote(view, experience)
        if quote is None:
            return Plan.NOTHING
        menu = quote.menu
        parties, choice = self._deal(view, quote)
        draft = Draft(view)
        place_all(draft, menu, parties, choice)
        if menu.is_sure.all() and self.lengths == "known":
            note = experience.note(view, lengths=False) if experience.outlook is not before else None
            plan = draft.finish(self._reason(draft, quote), note=note)
            return plan if plan.changes or plan.note else Plan.NOTHING
        experience.see(menu.jobs, draft)
        note = experience.note(view, lengths=self.lengths == "unknown")
        return draft.finish(self._reason(draft, quote), wake_at=self._wake_at(view, quote), note=note)

    def why(self, view: Snapshot, job: Job) -> str:
        """What the job holds or would pay, at the prices of now."""
        quote = self._quote(view, PolicyMemory.of(view))
        if quote is None or job.phase.is_over or all(job.id != other.id for other in quote.menu.jobs):
            return Policy.why(self, view, job)
        return explain_job(quote.menu, quote.market, quote.worths, quote.prices, job)

    # --------------------------------------------------------------------------------------------------------- prices
    def _quote(self, view: Snapshot, experience: PolicyMemory) -> Quote | None:
        """The menu and its prices; None when there is nothing to deal out."""
        jobs = sorted(view.active(), key=lambda job: job.seq)
        if not jobs:
            return None
        self._memo.keep_for(view.estimates, view.cluster)
        menu = build_menu(view, jobs, experience.tried, GrowthLimits(self.growth, self.trust, self.tunes), self._memo)
        if not menu.offers:
            return None
        work, weights = self._work(view, menu, experience), self._weights(view, jobs)
        market = Market(menu.rates, menu.needs, menu.supply, weights, work)
        if self.objective == "makespan":
            market = Market(menu.rates, menu.needs, menu.supply, market.seconds().min(axis=1).clip(_TINY, 1e12), work)
            parts = np.zeros(len(jobs))
            prices = market.clear(parts)
        else:
            along = self._along(market, view.at, experience)
            prices, parts = _cleared(market, _replaced(market, jobs, view.at), along)
        return Quote(menu, market, prices, market.worths(prices, parts))

    def _along(self, market: Market, at: float, experience: PolicyMemory) -> Floats | None:
        """What kinds cost against each other, looked up anew if need be; None where that is not known."""
        if len(market.supply) == 1 or market.is_large:
            return None
        if experience.outlook is None or not experience.outlook.holds(market, at):
            experience.outlook = relative_prices(market, at)
        return experience.outlook.along

    def _weights(self, view: Snapshot, jobs: Sequence[Job]) -> Floats:
        """Each job's own, and more once it has waited long."""
        weights = np.array([job.spec.weight for job in jobs])
        for row, job in enumerate(jobs):
            age = view.at - job.submitted_at
            if age > self.patience_s:
                waited = age - view.attained_s(job) / job.spec.narrowest
                weights[row] *= max(1.0, 1.0 + waited / self.patience_s)
        return weights

    def _work(self, view: Snapshot, menu: Menu, experience: PolicyMemory) -> Floats:
        """Units of work still to do of each: as known, else as its like had, else as much as is done.

        Before a job has run nobody knows how fast it is: it is taken to be young.
        """
        work: Floats = np.maximum(_YOUNG_S * menu.rates.max(axis=1), _TINY)
        known, at = self.lengths == "known", view.at
        for row, (job, is_sure) in enumerate(zip(menu.jobs, menu.is_sure.tolist(), strict=True)):
            if is_sure or job.service or (job.desired is not None and view.attained_s(job)):
                left = view.estimates.remaining(job, at).mean if known else experience.left(job, at)
                work[row] = max(left, _TINY) if left is not None and isfinite(left) else max(job.done_at(at), work[row])
        return work

    # ----------------------------------------------------------------------------------------------------------- deal
    def _deal(self, view: Snapshot, quote: Quote) -> tuple[ColocationGroups, InputPlan]:
        """Who shares with whom, and what everybody gets.

        Sharing makes devices cheaper, so parties are formed at the prices and well below; the better deal counts.
        """
        menu, prices = quote.menu, quote.prices
        values, stays = self._values(view, quote)
        deals: list[tuple[float, ColocationGroups, InputPlan]] = []
        for level in (prices, _WITH_PARTIES * prices):
            parties = form_groups(view, menu, quote.worths, values, stays, level, most=self.together, known=self._memo)
            choice = solve_knapsack(parties.values, menu.needs, menu.supply, level)
            runs = np.flatnonzero(choice != NONE)
            deals.append((float(parties.values[runs, choice[runs]].sum()), parties, choice))
            if len(parties) == len(menu.jobs):
                break
        _, parties, choice = max(deals, key=lambda solve_knapsack: solve_knapsack[0])
        return parties, choice

    def _values(self, view: Snapshot, quote: Quote) -> tuple[Floats, Floats]:
        """[job, offer] of what moving there is worth, and [job] of staying."""
        menu, market, worths = quote.menu, quote.market, quote.worths
        move = moves_s(view.estimates, menu.jobs, self.move_s)
        rest = np.clip(market.seconds(), _TINY, self.horizon_s)
        runs = menu.held != NONE
        kept = np.where(runs[:, None], np.maximum(_LEAST, 1.0 - move[:, None] / rest), 1.0)
        values = worths[:, None] * menu.rates * kept
        stick = np.where(menu.is_sure, _STAYS, self.trust)
        rest_here = np.clip(market.work / np.maximum(menu.stay_rates, 1e-30), _TINY, self.horizon_s)
        stays = worths * menu.stay_rates * stick * (1.0 + np.minimum(1.0, move / rest_here))
        return values, stays

    # -------------------------------------------------------------------------------------------------------- telling
    def _wake_at(self, view: Snapshot, quote: Quote) -> float:
        """Look again after a fifth of the shortest time left: beliefs may have changed by then."""
        shortest = float(quote.market.seconds().min(axis=1).min())
        return view.at + min(self.interval_s, max(self.interval_s / 4.0, shortest / 5.0))

    def _reason(self, draft: Draft, quote: Quote) -> str:
        """The prices, and of a few jobs that change why."""
        menu = quote.menu
        jobs, changes = draft.view.jobs, draft.changes
        runs = int(np.count_nonzero(menu.held != NONE))
        for job_id, change in changes.items():
            runs += (change.allocation is not None) - (jobs[job_id].desired is not None)
        told = []
        for job in sorted([jobs[name] for name in changes], key=lambda job: job.seq) if len(changes) <= _TOLD else ():
            after = job._replace(desired=draft.holding(job))
            told.append(f"{job.id} {explain_job(menu, quote.market, quote.worths, quote.prices, after)}")
        headline = f"{runs} of {len(menu.jobs)} jobs run at a price of {join_words(menu, quote.prices)}"
        return "; ".join([headline, *told])


def _cleared(market: Market, replaced: Floats, along: Floats | None) -> tuple[Floats, Floats]:
    """Prices, and the part of them that is left when each job ends: each follows from the other."""
    parts = np.full(len(market.work), 0.5)
    prices = market.clear(parts, along=along)
    for _ in range(_ROUNDS):
        parts = ends(market.bills(prices), market.weights, replaced)
        prices = market.clear(parts, prices, along)
    return prices, parts


def _replaced(market: Market, jobs: Sequence[Job], at: float) -> Floats:
    """[job]: how far those who leave before it ends will be replaced: not at all in a batch, else up to half.

    Arrivals are expected to go on for about as long as they have been seen to go on.
    """
    came = np.array([job.submitted_at for job in jobs])
    late = market.weights[came > came.min()].sum() / market.weights.sum()
    seen_s = at - float(came.min()) + _TINY
    return np.asarray(_REPLACED * late * seen_s / (seen_s + market.seconds().min(axis=1)))


@register("elastic")
@dataclass(frozen=True, slots=True)
class Elastic(Carpool):
    """The default's prices, for what AFS moves: how many devices of which kind each job has.

    AFS compares two jobs, the one that ends first inheriting nothing and the other everything; here everybody inherits
    from everybody, on all kinds, with weights, the links that the estimator knows of, and the price of a resize. Hwang
    et al., "Elastic Resource Sharing for Distributed Deep Learning", NSDI 2021.
    """

    shares_devices: ClassVar[bool] = False
    tunes: ClassVar[bool] = False

    together: int = 1
