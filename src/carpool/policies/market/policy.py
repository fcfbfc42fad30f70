"""Market policies `carpool` (the default) and `elastic`: devices go where they save most weighted completion time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import ClassVar, NamedTuple

import numpy as np

from carpool.core.draft import Draft
from carpool.core.errors import InputError, UnknownName
from carpool.core.model import Allocation, Job
from carpool.core.policy import Plan, Policy, Snapshot
from carpool.policies.market.colocation_groups import ColocationGroups, form_groups, form_lane_groups
from carpool.policies.market.group_trials import GroupTrials, explain_sharing
from carpool.policies.market.knapsack import NONE, Choices, solve_knapsack
from carpool.policies.market.lane_groups import MOST, Bids
from carpool.policies.market.menu import GrowthLimits, Menu, build_menu, shape_of
from carpool.policies.market.placement import place_all
from carpool.policies.market.policy_memory import EstimateCache, Offer, PolicyMemory
from carpool.policies.market.prices import Floats, Market, ends, relative_prices
from carpool.policies.registry import register


class Quote(NamedTuple):
    """A menu with its prices."""

    menu: Menu
    market: Market
    prices: Floats  # [kind]
    worths: Floats  # [job]: λ


_ORDINALS = ("", "first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")
_NAMED = 3  # jobs that an explanation names
_LEAST_PRICE = 1e-4  # below, a price is shown as 0


def explain_job(quote: Quote, job: Job, holding: Callable[[Job], Allocation | None]) -> str:
    """Why a job waits, or holds what `holding` says, at the current prices."""
    menu = quote.menu
    row = next(row for row, other in enumerate(menu.jobs) if other.id == job.id)
    held = holding(job)
    if held is None:
        return _explain_waiting(quote, row, holding)
    words = _explain_holding(quote, row, shape_of(menu.cluster, held))
    if held.batch_size not in (0, job.spec.batch_size):
        words += f"; batch size {held.batch_size}"
    return words if held.fractions == (1.0,) else f"{words}; at {held.shares[0].fraction:.0%}"


def _explain_prices(quote: Quote) -> str:
    """Such as ``one more V100 would save 0.04 s per second, one more K80 0.01 s``."""
    kinds = zip(quote.menu.cluster.kinds, quote.prices.tolist(), strict=True)
    priced = [(kind, _price(price)) for kind, price in kinds if price >= _LEAST_PRICE]
    if not priced:
        return "more devices would not help"
    (kind, price), *others = priced
    listed = [f"one more {kind} would save {price} s per second"]
    return ", ".join([*listed, *[f"one more {kind} {price} s" for kind, price in others]])


def _explain_holding(quote: Quote, row: int, offer: Offer) -> str:
    """Such as ``holds 3 V100 (each would save other jobs 0.04 s per second); a fourth would save it 210 s and …``."""
    menu, market = quote.menu, quote.market
    kind, count = offer.groups[0]
    price = float(quote.prices[menu.cluster.kinds.index(kind)])
    others = f"{'each' if count > 1 else 'it'} would save other jobs {_price(price)} s per second"
    words = f"holds {offer.words()} ({others if price >= _LEAST_PRICE else 'no other job needs more'})"
    column = menu.offers.index(offer)
    more = _next_larger(menu, row, offer)
    if more is None or not menu.rates[row, column]:
        return words
    now_s, then_s = market.work[row] * market.per_unit[row, [column, more]]
    saved = float(market.weights[row] * (now_s - then_s))
    extra = menu.offers[more].width
    cost = max(0.0, price * (extra * then_s - count * now_s))
    which = f"a {_ORDINALS[extra]}" if extra == count + 1 and extra < len(_ORDINALS) else f"{extra - count} more"
    if saved <= 0.0:
        return f"{words}; {which} would not make it faster"
    return f"{words}; {which} would save it {_seconds(saved)} and cost other jobs {_seconds(cost)}"


def _explain_waiting(quote: Quote, row: int, holding: Callable[[Job], Allocation | None]) -> str:
    """Such as ``waits for 2 V100 held by a: each would save this job 0.4 s per second of use, but other jobs …``."""
    menu = quote.menu
    costs = menu.needs @ quote.prices
    worth = quote.worths[row] * menu.rates[row]
    if not worth.any():
        return "waits: no device in the cluster can run it"
    best = int(np.where(worth > 0.0, worth - costs, -np.inf).argmax())
    offer = menu.offers[best]
    price, own = costs[best] / offer.width, worth[best] / offer.width
    saving = f"{'each' if offer.width > 1 else 'it'} would save this job {_price(own)} s per second of use"
    but = "no fitting devices are free now" if own >= price else f"other jobs {_price(price)} s"
    return f"waits for {offer.words()}{_holders(menu, offer, holding)}: {saving}, but {but}"


def _holders(menu: Menu, offer: Offer, holding: Callable[[Job], Allocation | None]) -> str:
    """Such as `` held by a, b, c and 2 more``: the jobs on devices of the offer's types."""
    kinds = {kind for kind, _ in offer.groups}
    held = [(job, shape_of(menu.cluster, own)) for job in menu.jobs if (own := holding(job)) is not None]
    names = [job.id for job, shape in held if kinds & {kind for kind, _ in shape.groups}]
    if len(names) > _NAMED:
        return f" held by {', '.join(names[:_NAMED])} and {len(names) - _NAMED} more"
    return f" held by {' and '.join(names)}" if names else ""


def _price(price: float) -> str:
    """Weighted seconds of completion time per device-second."""
    return f"{price:.3g}" if price >= _LEAST_PRICE else "0"


def _next_larger(menu: Menu, row: int, offer: Offer) -> int | None:
    """The next larger offer of the same device type that the job could use."""
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


_UNPREDICTED = 2  # jobs on one device where the estimator cannot tell what shares do
_WITH_GROUPS = 0.6  # how far prices may fall because jobs share devices
_ROUNDS = 2  # of prices and the order of completion, which depend on each other
_REPLACED = 0.5  # part of the completed jobs that arrivals replace, where jobs arrive
_STAYS = 1.02  # bonus on the current holding, so that ties move no job
_LEAST = 0.01  # of a job's value remains, however expensive a move
_TINY = 1e-9  # least work
_STARTED = 0.5  # part of its length that a job is taken to have left once it runs, before its first report
_YOUNG_S = 300.0  # least remaining time assumed for a job of unknown length
_EXPLAINED = 2  # changes up to which a plan's reason explains each


@register("carpool")
@dataclass(frozen=True, slots=True)
class Carpool(Policy):
    """Market-clearing prices per device type, and an exact assignment of jobs at the margin (`prices`, `knapsack`).

    The value of an option to a job is λ_j · g_j(o). A move costs its standstill: the value is multiplied by
    (h − move)/h, h being the rest of the job, at most `horizon_s`. While rates are estimates, staying counts `trust`
    times, and no job gets more than `growth` times the devices it has tried. A job of unknown length is taken to be
    half done. Weights grow with waiting time, so no job starves. Jobs worth more together than apart share devices
    (`colocation_groups`).

    With `objective` makespan a job's weight is its shortest run time, and prices do not fall over time: the longest
    jobs come first, each on its comparatively fastest devices.
    """

    shares_devices: ClassVar[bool] = True
    max_virtual: ClassVar[float] = float(MOST)
    tunes: ClassVar[bool] = True  # whether it also chooses batch sizes, where jobs allow it

    objective: str = "jct"
    lengths: str = "known"
    together: int = 0  # most jobs on one device; 0: eight where the estimator predicts what shares do, else two
    growth: int = 4
    trust: float = 1.1
    move_s: float = 0.1  # cost of a move the estimator does not know
    horizon_s: float = 1000.0
    patience_s: float = 86400.0  # waiting time that adds a job's weight once more
    interval_s: float = 60.0  # plan again after this, or up to four times as often, while rates are estimates
    _memo: EstimateCache = field(default_factory=EstimateCache, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, value, words in (
            ("objective", self.objective, ("jct", "makespan")),
            ("lengths", self.lengths, ("known", "unknown")),
        ):
            if value not in words:
                raise UnknownName(name, value, words)
        if self.growth < 2:
            raise InputError(
                f"growth is {self.growth}",
                way_out="Give 2 or more, so that jobs can get more devices than they have tried.",
            )
        if self.together < 0 or self.trust < 1.0 or self.patience_s <= 0.0:
            raise InputError(
                f"together {self.together}, trust {self.trust} or patience_s {self.patience_s} is too small",
                way_out="Such as carpool:together=2:trust=1.1:patience_s=86400.",
            )

    def plan(self, view: Snapshot) -> Plan:
        memory = PolicyMemory.of(view)
        before = memory.outlook
        quote = self._quote(view, memory)
        if quote is None:
            return Plan.NOTHING
        menu = quote.menu
        groups, choice = self._assign(view, quote, memory.trials)
        draft = Draft(view)
        place_all(draft, menu, groups, choice)
        if menu.is_sure.all() and self.lengths == "known":
            note = memory.note(view, lengths=False) if memory.outlook is not before else None
            plan = draft.finish(self._reason(draft, quote), note=note)
            return plan if plan.changes or plan.note else Plan.NOTHING
        memory.see(menu.jobs, draft)
        wake_at = self._wake_at(view, quote)
        look_at = memory.trials.review(draft) if view.estimates.predicts_retention else None
        note = memory.note(view, lengths=self.lengths == "unknown")
        wake_at = wake_at if look_at is None else min(wake_at, look_at)
        return draft.finish(self._reason(draft, quote), wake_at=wake_at, note=note)

    def why(self, view: Snapshot, job: Job) -> str:
        quote = self._quote(view, PolicyMemory.of(view))
        if quote is None or job.phase.is_over or all(job.id != other.id for other in quote.menu.jobs):
            return Policy.why(self, view, job)
        sharing = explain_sharing(view, job)
        words = explain_job(quote, job, lambda other: other.desired)
        return f"{words}; {sharing}" if sharing else words

    def _quote(self, view: Snapshot, memory: PolicyMemory) -> Quote | None:
        """The menu and its prices; None without jobs or devices."""
        jobs = sorted(view.active(), key=lambda job: job.seq)
        if not jobs:
            return None
        self._memo.keep_for(view.estimates, view.cluster)
        menu = build_menu(view, jobs, memory.tried, GrowthLimits(self.growth, self.trust, self.tunes), self._memo)
        if not menu.offers:
            return None
        work, weights = self._work(view, menu, memory), self._weights(view, jobs)
        market = Market(menu.rates, menu.needs, menu.supply, weights, work)
        if self.objective == "makespan":
            market = Market(menu.rates, menu.needs, menu.supply, market.seconds().min(axis=1).clip(_TINY, 1e12), work)
            parts = np.zeros(len(jobs))
            prices = market.clear(parts)
        else:
            along = self._relative_prices(market, view.at, memory)
            prices, parts = _cleared(market, _replaced(market, jobs, view.at), along)
        return Quote(menu, market, prices, market.worths(prices, parts))

    def _relative_prices(self, market: Market, at: float, memory: PolicyMemory) -> Floats | None:
        """Prices of device types relative to each other, refreshed when outdated; None with one device type."""
        if len(market.supply) == 1 or market.is_large:
            return None
        if memory.outlook is None or not memory.outlook.holds(market, at):
            memory.outlook = relative_prices(market, at)
        return memory.outlook.along

    def _weights(self, view: Snapshot, jobs: Sequence[Job]) -> Floats:
        weights = np.array([job.spec.weight for job in jobs])
        for row, job in enumerate(jobs):
            age = view.at - job.submitted_at
            if age > self.patience_s:
                waited = age - view.attained_s(job) / job.spec.narrowest
                weights[row] *= max(1.0, 1.0 + waited / self.patience_s)
        return weights

    def _work(self, view: Snapshot, menu: Menu, memory: PolicyMemory) -> Floats:
        """Units of work left of each job: as estimated, else as jobs of its model needed, else as much as is done.

        A job that has not run yet, and whose rate is an estimate, is taken to need `_YOUNG_S`.
        """
        work: Floats = np.maximum(_YOUNG_S * menu.rates.max(axis=1), _TINY)
        known, at = self.lengths == "known", view.at
        unknown: list[int] = []
        for row, (job, is_sure) in enumerate(zip(menu.jobs, menu.is_sure.tolist(), strict=True)):
            if not is_sure and not view.estimates.knows_scale(job.spec):
                unknown.append(row)
                continue
            if is_sure or job.service or (job.desired is not None and view.attained_s(job)):
                left = view.estimates.remaining(job, at).mean if known else memory.left(job, at)
                work[row] = max(left, _TINY) if left is not None and isfinite(left) else max(job.done_at(at), work[row])
        if 0 < len(unknown) < len(work):  # as long as the others
            done = np.array([job.done_at(at) for job in menu.jobs])
            others = np.delete((work + done) / np.maximum(menu.rates.max(axis=1), _TINY), unknown)
            work[unknown] = np.median(others) * menu.rates[unknown].max(axis=1) + _TINY
        runs = [row for row in unknown if menu.held[row] != NONE]
        work[runs] *= _STARTED
        return work

    def _assign(self, view: Snapshot, quote: Quote, trials: GroupTrials) -> tuple[ColocationGroups, Choices]:
        """The co-location groups, and the option of each.

        Sharing lowers prices, so groups are formed at the prices and well below; the assignment worth more counts.
        """
        menu, prices = quote.menu, quote.prices
        values, stays = self._values(view, quote)
        found: list[tuple[float, ColocationGroups, Choices]] = []
        for level in (prices, _WITH_GROUPS * prices):
            groups = self._groups(view, quote, (values, stays), level, trials)
            choice = solve_knapsack(groups.values, menu.needs, menu.supply, level)
            runs = np.flatnonzero(choice != NONE)
            found.append((float(groups.values[runs, choice[runs]].sum()), groups, choice))
            if len(groups) == len(menu.jobs):
                break
        _, groups, choice = max(found, key=lambda each: each[0])
        return groups, choice

    def _groups(
        self, view: Snapshot, quote: Quote, valued: tuple[Floats, Floats], prices: Floats, trials: GroupTrials
    ) -> ColocationGroups:
        menu, market, (values, stays) = quote.menu, quote.market, valued
        if self.shares_devices and self.together != 1 and view.estimates.predicts_retention:
            moves = self._moves_s(view, menu.jobs)
            bids = Bids(quote.worths, values, stays, market.seconds(), market.weights, moves)
            return form_lane_groups(view, menu, bids, prices, trials, most=self.together or MOST)
        most = self.together or _UNPREDICTED
        return form_groups(view, menu, quote.worths, values, stays, prices, most=most, known=self._memo)

    def _values(self, view: Snapshot, quote: Quote) -> tuple[Floats, Floats]:
        """[job, offer]: the value of moving there; [job]: the value of staying."""
        menu, market, worths = quote.menu, quote.market, quote.worths
        move = self._moves_s(view, menu.jobs)
        rest = np.clip(market.seconds(), _TINY, self.horizon_s)
        runs = menu.held != NONE
        kept = np.where(runs[:, None], np.maximum(_LEAST, 1.0 - move[:, None] / rest), 1.0)
        values = worths[:, None] * menu.rates * kept
        stick = np.where(menu.is_sure, _STAYS, self.trust)
        rest_here = np.clip(market.work / np.maximum(menu.stay_rates, 1e-30), _TINY, self.horizon_s)
        stays = worths * menu.stay_rates * stick * (1.0 + np.minimum(1.0, move / rest_here))
        return values, stays

    def _moves_s(self, view: Snapshot, jobs: Sequence[Job]) -> Floats:
        """[job]: seconds that a move costs; irrelevant for jobs that hold nothing."""
        known = [None if job.desired is None else view.estimates.move_s(job.spec) for job in jobs]
        return np.array([self.move_s if seconds is None else seconds for seconds in known])

    def _wake_at(self, view: Snapshot, quote: Quote) -> float:
        """Plan again after a fifth of the shortest remaining time: estimates may have changed by then."""
        shortest = float(quote.market.seconds().min(axis=1).min())
        return view.at + min(self.interval_s, max(self.interval_s / 4.0, shortest / 5.0))

    def _reason(self, draft: Draft, quote: Quote) -> str:
        menu = quote.menu
        jobs, changes = draft.view.jobs, draft.changes
        runs = int(np.count_nonzero(menu.held != NONE))
        for job_id, change in changes.items():
            runs += (change.allocation is not None) - (jobs[job_id].desired is not None)
        changed = sorted([jobs[name] for name in changes], key=lambda job: job.seq)
        explained = changed if len(changed) <= _EXPLAINED else []
        words = [f"{job.id} {explain_job(quote, job, draft.holding)}" for job in explained]
        return "; ".join([f"{runs} of {len(menu.jobs)} jobs run", _explain_prices(quote), *words])


def _cleared(market: Market, replaced: Floats, along: Floats | None) -> tuple[Floats, Floats]:
    """Prices, and per job the fraction of its price still charged when it ends; found by iteration."""
    parts = np.full(len(market.work), 0.5)
    prices = market.clear(parts, along=along)
    for _ in range(_ROUNDS):
        parts = ends(market.bills(prices), market.weights, replaced)
        prices = market.clear(parts, prices, along)
    return prices, parts


def _replaced(market: Market, jobs: Sequence[Job], at: float) -> Floats:
    """[job]: the part of the jobs ending before it that arrivals will replace: none in a batch, else up to half.

    Arrivals are expected to continue for about as long as they have lasted.
    """
    came = np.array([job.submitted_at for job in jobs])
    late = market.weights[came > came.min()].sum() / market.weights.sum()
    seen_s = at - float(came.min()) + _TINY
    return np.asarray(_REPLACED * late * seen_s / (seen_s + market.seconds().min(axis=1)))


@register("elastic")
@dataclass(frozen=True, slots=True)
class Elastic(Carpool):
    """The default policy without sharing and batch tuning: the number and type of devices of each job.

    AFS compares jobs in pairs, the one that ends later inheriting all devices of the other. Prices extend that to all
    jobs, device types, weights, links and resize costs. Hwang et al., "Elastic Resource Sharing for Distributed Deep
    Learning", NSDI 2021.
    """

    shares_devices: ClassVar[bool] = False
    max_virtual: ClassVar[float] = 1.0
    tunes: ClassVar[bool] = False

    together: int = 1
