"""The default: every device goes where it saves most weighted completion time, at prices that clear the market."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import ClassVar, NamedTuple

import numpy as np

from carpool.core.draft import Draft
from carpool.core.errors import InputError, UnknownName
from carpool.core.model import Job
from carpool.core.policy import Plan, Policy, Snapshot
from carpool.policies.experience import Experience
from carpool.policies.knapsack import NONE, Choice, deal
from carpool.policies.known import Known
from carpool.policies.moves import moves_s
from carpool.policies.options import Caution, Menu, draw_up
from carpool.policies.outlook import look_ahead
from carpool.policies.parties import Parties, join
from carpool.policies.prices import Floats, Market, ends
from carpool.policies.reasons import about, listed
from carpool.policies.registry import register
from carpool.policies.seating import seat_all

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
    _memo: Known = field(default_factory=Known, init=False, repr=False, compare=False)

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
        experience = Experience.of(view)
        before = experience.outlook
        quote = self._quote(view, experience)
        if quote is None:
            return Plan.NOTHING
        menu = quote.menu
        parties, choice = self._deal(view, quote)
        draft = Draft(view)
        seat_all(draft, menu, parties, choice)
        if menu.is_sure.all() and self.lengths == "known":
            note = experience.note(view, lengths=False) if experience.outlook is not before else None
            plan = draft.finish(self._reason(draft, quote), note=note)
            return plan if plan.changes or plan.note else Plan.NOTHING
        experience.see(menu.jobs, draft)
        note = experience.note(view, lengths=self.lengths == "unknown")
        return draft.finish(self._reason(draft, quote), wake_at=self._wake_at(view, quote), note=note)

    def why(self, view: Snapshot, job: Job) -> str:
        """What the job holds or would pay, at the prices of now."""
        quote = self._quote(view, Experience.of(view))
        if quote is None or job.phase.is_over or all(job.id != other.id for other in quote.menu.jobs):
            return Policy.why(self, view, job)
        return about(quote.menu, quote.market, quote.worths, quote.prices, job)

    # --------------------------------------------------------------------------------------------------------- prices
    def _quote(self, view: Snapshot, experience: Experience) -> Quote | None:
        """The menu and its prices; None when there is nothing to deal out."""
        jobs = sorted(view.active(), key=lambda job: job.seq)
        if not jobs:
            return None
        self._memo.keep_for(view.estimates, view.cluster)
        menu = draw_up(view, jobs, experience.tried, Caution(self.growth, self.trust, self.tunes), self._memo)
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

    def _along(self, market: Market, at: float, experience: Experience) -> Floats | None:
        """What kinds cost against each other, looked up anew if need be; None where that is not known."""
        if len(market.supply) == 1 or market.is_large:
            return None
        if experience.outlook is None or not experience.outlook.holds(market, at):
            experience.outlook = look_ahead(market, at)
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

    def _work(self, view: Snapshot, menu: Menu, experience: Experience) -> Floats:
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
    def _deal(self, view: Snapshot, quote: Quote) -> tuple[Parties, Choice]:
        """Who shares with whom, and what everybody gets.

        Sharing makes devices cheaper, so parties are formed at the prices and well below; the better deal counts.
        """
        menu, prices = quote.menu, quote.prices
        values, stays = self._values(view, quote)
        deals: list[tuple[float, Parties, Choice]] = []
        for level in (prices, _WITH_PARTIES * prices):
            parties = join(view, menu, quote.worths, values, stays, level, most=self.together, known=self._memo)
            choice = deal(parties.values, menu.needs, menu.supply, level)
            runs = np.flatnonzero(choice != NONE)
            deals.append((float(parties.values[runs, choice[runs]].sum()), parties, choice))
            if len(parties) == len(menu.jobs):
                break
        _, parties, choice = max(deals, key=lambda deal: deal[0])
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
            told.append(f"{job.id} {about(menu, quote.market, quote.worths, quote.prices, after)}")
        headline = f"{runs} of {len(menu.jobs)} jobs run at a price of {listed(menu, quote.prices)}"
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
