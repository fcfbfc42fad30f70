"""The default: every device goes where it saves most weighted completion time, at prices that clear the market."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Any, ClassVar, cast

import numpy as np

from carpool.core.draft import Draft
from carpool.core.errors import InputError
from carpool.core.model import Job, JobId
from carpool.core.policy import Plan, Policy, Snapshot
from carpool.policies.goodput import KnowsGoodput
from carpool.policies.knapsack import NONE, Choice, deal
from carpool.policies.moves import moves_s
from carpool.policies.options import Known, Menu, draw_up
from carpool.policies.parties import Party, join
from carpool.policies.prices import Floats, Market, ends
from carpool.policies.registry import register
from carpool.policies.seating import seat_all

_WITH_PARTIES = 0.6  # how far prices may fall because jobs share
_ROUNDS = 2  # of prices and the order of ends, which depend on each other
_LEAST = 0.01  # of a job's value is left however dear a move
_TINY = 1e-9  # work that is as good as none
_YOUNG_S = 300.0  # what a job of which nothing is known is taken to need at least


@register("carpool")
@dataclass(frozen=True, slots=True)
class Carpool(Policy):
    """Prices for devices, a worth for every job's work, and an exact deal at the margin (`prices`, `knapsack`).

    The value of an option is λ_j · g_j(o) for as long as it will last. Who moves loses the standstill: the value is
    multiplied by (h − move)/h, h the rest of the job, at most `horizon_s`; who stays where it is saves the move.
    While rates are only believed, who stays counts `trust` times, and no job gets more than `growth` times the devices
    it has tried. With unknown lengths a job is taken to be half done, and at least `_YOUNG_S` long.
    """

    shares_devices: ClassVar[bool] = True

    lengths: str = "known"
    growth: int = 4
    trust: float = 1.1
    move_s: float = 0.1  # where the estimator does not say
    horizon_s: float = 1000.0
    patience_s: float = 86400.0  # a job that has waited so long counts twice, after twice that three times …
    interval_s: float = 60.0  # looks again after so long while rates are only believed
    together: int = 2  # most jobs on one device
    _memo: Known = field(default_factory=Known, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check the ranges."""
        if self.lengths not in ("known", "unknown"):
            raise InputError(f"lengths is {self.lengths!r}", way_out="Give known or unknown.")
        if self.growth < 2:
            raise InputError(f"growth is {self.growth}", way_out="Give 2 or more, or jobs never get more devices.")

    def plan(self, view: Snapshot) -> Plan:
        """Find prices, deal devices out, move whom that moves."""
        jobs = sorted(view.active(), key=lambda job: job.seq)
        if not jobs:
            return Plan.NOTHING
        tried = {job.id: count for job in jobs if (count := cast(dict[str, Any], view.note or {}).get(job.id))}
        menu = draw_up(view, jobs, tried, self.growth, self._known_of(view))
        if not menu.offers:
            return Plan.NOTHING
        market = self._market(view, menu)
        prices, parts = self._clear(market)
        worths = market.worths(prices, parts)
        values, stays = self._values(view, menu, market, worths)
        parties, choice = self._deal(view, menu, worths, values, stays, prices)
        draft = Draft(view)
        seat_all(draft, menu, parties, choice)
        unsure = not menu.is_sure.all()
        if unsure:
            _note_widths(draft, menu, tried)
        reason = f"a second of a device costs {_listed(menu, prices)}; {sum(choice != NONE)} of {len(jobs)} jobs run"
        wake_at = view.at + self.interval_s if unsure else None
        plan = draft.finish(reason, wake_at=wake_at, note=tried if unsure else None)
        return plan if plan.changes or plan.wake_at is not None else Plan.NOTHING

    def _deal(
        self, view: Snapshot, menu: Menu, worths: Floats, values: Floats, stays: Floats, prices: Floats
    ) -> tuple[list[Party], Choice]:
        """Who shares with whom, and what everybody gets.

        Sharing makes devices cheaper, so parties are formed at the prices and well below; the better deal counts.
        """
        most = 1 if isinstance(view.estimates, KnowsGoodput) else self.together
        deals: list[tuple[float, list[Party], Choice]] = []
        for level in (prices, _WITH_PARTIES * prices):
            parties = join(view, menu, worths, values, stays, level, most=most, known=self._memo)
            offered = np.array([party.values for party in parties])
            choice = deal(offered, menu.needs, menu.supply, level)
            runs = np.flatnonzero(choice != NONE)
            deals.append((float(offered[runs, choice[runs]].sum()), parties, choice))
            if len(parties) == len(menu.jobs):
                break
        _, parties, choice = max(deals, key=lambda deal: deal[0])
        return parties, choice

    def _known_of(self, view: Snapshot) -> Known:
        """Answers of the estimator that hold while it has learned nothing new; they change no plan, only its cost."""
        if self._memo.version != view.estimates.version or len(self._memo.rows) > 2 * len(view.jobs) + 100:
            self._memo.forget(view.estimates.version)
        return self._memo

    def _market(self, view: Snapshot, menu: Menu) -> Market:
        """Weights that grow with waiting, and what is left to do."""
        weights = np.array([job.spec.weight * self._aged(view, job) for job in menu.jobs])
        fastest = menu.rates.max(axis=1)
        work = np.array(
            [self._left(view, job, fastest[row], sure=menu.is_sure[row]) for row, job in enumerate(menu.jobs)]
        )
        return Market(menu.rates, menu.needs, menu.supply, weights, work)

    def _aged(self, view: Snapshot, job: Job) -> float:
        """1 for a job that has not waited long."""
        age = view.at - job.submitted_at
        if age <= self.patience_s:
            return 1.0
        waited = age - view.attained_s(job) / job.spec.narrowest
        return max(1.0, 1.0 + waited / self.patience_s)

    def _left(self, view: Snapshot, job: Job, rate: float, *, sure: bool) -> float:
        """Units of work still to do: as known, else as much as is done.

        Before a job has run nobody knows how fast it is: it is taken to be young.
        """
        young = max(_YOUNG_S * rate, _TINY)
        if not sure and not view.attained_s(job):
            return young
        left = view.estimates.remaining(job, view.at).mean if self.lengths == "known" else inf
        return max(left, _TINY) if isfinite(left) else max(job.done_at(view.at), young)

    def _clear(self, market: Market) -> tuple[Floats, Floats]:
        """Prices, and the part of them that is left when each job ends."""
        parts = np.full(len(market.work), 0.5)
        prices = market.clear(parts)
        for _ in range(_ROUNDS):
            parts = ends(market.bills(prices), market.weights)
            prices = market.clear(parts, near=prices)
        return prices, parts

    def _values(self, view: Snapshot, menu: Menu, market: Market, worths: Floats) -> tuple[Floats, Floats]:
        """[job, offer] of what moving there is worth, and [job] of staying."""
        move = moves_s(view.estimates, menu.jobs, self.move_s)
        rest = np.clip(market.seconds(), 1e-9, self.horizon_s)
        runs = menu.held != NONE
        kept = np.where(runs[:, None], np.maximum(_LEAST, 1.0 - move[:, None] / rest), 1.0)
        values = worths[:, None] * menu.rates * kept
        stick = np.where(menu.is_sure, 1.0, self.trust)
        held_rest = np.clip(market.work / np.maximum(menu.stay_rates, 1e-30), 1e-9, self.horizon_s)
        stays = worths * menu.stay_rates * stick * (1.0 + np.minimum(1.0, move / held_rest))
        return values, stays


def _note_widths(draft: Draft, menu: Menu, tried: dict[JobId, int]) -> None:
    """Remember the most devices each job has had."""
    for job in menu.jobs:
        held = draft.holding(job)
        if held is not None:
            tried[job.id] = max(tried.get(job.id, 0), held.num_devices)


def _listed(menu: Menu, prices: Floats) -> str:
    return ", ".join([f"{price:.3g} ({kind})" for kind, price in zip(menu.cluster.kinds, prices, strict=True)])
