"""The default: every device goes where it saves most weighted completion time, at prices that clear the market."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any, cast

import numpy as np

from carpool.core.draft import Draft
from carpool.core.errors import InputError
from carpool.core.model import Job
from carpool.core.policy import Plan, Policy, Snapshot
from carpool.policies.knapsack import NONE, Choice, deal
from carpool.policies.moves import move_s
from carpool.policies.options import Menu, Offer, ask_apart, draw_up
from carpool.policies.prices import Floats, Market, clear, ends
from carpool.policies.registry import register
from carpool.policies.seating import seat

_ROUNDS = 2  # of prices and the order of ends, which depend on each other
_LEAST = 0.01  # of a job's value is left however dear a move
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

    lengths: str = "known"
    growth: int = 4
    trust: float = 1.1
    move_s: float = 0.1  # where the estimator does not say
    horizon_s: float = 1000.0
    patience_s: float = 86400.0  # a job that has waited so long counts twice, after twice that three times …
    interval_s: float = 60.0  # looks again after so long while rates are only believed

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
        menu = draw_up(view, jobs, tried, self.growth)
        if not menu.offers:
            return Plan.NOTHING
        market = self._market(view, menu)
        prices, parts = self._clear(market)
        values, stays = self._values(view, menu, market, market.worths(prices, parts))
        choice = deal(np.maximum(values, _at(stays, menu.held, values.shape)), menu.needs, menu.supply, prices)
        draft = Draft(view)
        carry_out(draft, menu, choice, values, stays)
        unsure = not menu.is_sure.all()
        if unsure:
            _note_widths(draft, menu, tried)
        reason = f"a second of a device costs {_listed(menu, prices)}; {sum(choice != NONE)} of {len(jobs)} jobs run"
        wake_at = view.at + self.interval_s if unsure else None
        plan = draft.finish(reason, wake_at=wake_at, note=tried if unsure else None)
        return plan if plan.changes or plan.wake_at is not None else Plan.NOTHING

    def _market(self, view: Snapshot, menu: Menu) -> Market:
        """Weights that grow with waiting, and what is left to do."""
        weights = np.array([job.spec.weight * self._aged(view, job) for job in menu.jobs])
        work = np.array(
            [self._left(view, job, rate) for job, rate in zip(menu.jobs, menu.rates.max(axis=1), strict=True)]
        )
        return Market(menu.rates, menu.needs, menu.supply, weights, work)

    def _aged(self, view: Snapshot, job: Job) -> float:
        """1 for a job that has not waited long."""
        age = view.at - job.submitted_at
        if age <= self.patience_s:
            return 1.0
        waited = age - view.attained_s(job) / job.spec.narrowest
        return max(1.0, 1.0 + waited / self.patience_s)

    def _left(self, view: Snapshot, job: Job, rate: float) -> float:
        """Units of work still to do: as known, else as much as is done."""
        if self.lengths == "known":
            left = view.estimates.remaining(job, view.at).mean
            if isfinite(left):
                return max(left, 1e-9)
        return max(job.done_at(view.at), _YOUNG_S * rate, 1e-9)

    def _clear(self, market: Market) -> tuple[Floats, Floats]:
        """Prices, and the part of them that is left when each job ends."""
        parts = np.full(len(market.work), 0.5)
        prices = clear(market, parts)
        for _ in range(_ROUNDS):
            parts = ends(market.bills(prices), market.weights)
            prices = clear(market, parts)
        return prices, parts

    def _values(self, view: Snapshot, menu: Menu, market: Market, worths: Floats) -> tuple[Floats, Floats]:
        """[job, offer] of what moving there is worth, and [job] of staying."""
        move = np.array([move_s(view.estimates, job.spec, self.move_s) for job in menu.jobs])
        rest = np.clip(market.seconds(), 1e-9, self.horizon_s)
        runs = menu.held != NONE
        kept = np.where(runs[:, None], np.maximum(_LEAST, 1.0 - move[:, None] / rest), 1.0)
        values = worths[:, None] * menu.rates * kept
        stick = np.where(menu.is_sure, 1.0, self.trust)
        held_rest = np.clip(market.work / np.maximum(menu.stay_rates, 1e-30), 1e-9, self.horizon_s)
        stays = worths * menu.stay_rates * stick * (1.0 + np.minimum(1.0, move / held_rest))
        return values, stays


def carry_out(draft: Draft, menu: Menu, choice: Choice, values: Floats, stays: Floats) -> None:
    """Who changes leaves first; then the largest is seated first, and what does not fit takes less or spreads out."""
    movers: list[int] = []
    for row, job in enumerate(menu.jobs):
        if choice[row] == menu.held[row] and (choice[row] == NONE or stays[row] >= values[row, choice[row]]):
            _tune(draft, menu, row, job)
            continue
        draft.release(job)
        if choice[row] != NONE:
            movers.append(row)
    movers.sort(key=lambda row: (-menu.offers[choice[row]].count, -values[row, choice[row]], row))
    for row in movers:
        place(draft, menu, row, int(choice[row]), values[row])


def place(draft: Draft, menu: Menu, row: int, wanted: int, values: Floats) -> None:
    """Seat a job as wanted, on as few nodes as possible; else the best of what there is."""
    job, offers = menu.jobs[row], menu.offers
    if seat(draft, job, offers[wanted], batch_size=int(menu.batches[row, wanted])):
        return
    free = draft.occupancy.free_devices
    fits = [o for o in np.flatnonzero(values > 0.0) if all(free.get(kind, 0) >= n for kind, n in offers[o].groups)]
    for option in sorted(fits, key=lambda option: -values[option]):
        answer = ask_apart(draft.view, job, offers[option])
        smaller = max([values[o] for o in fits if offers[o].count < offers[option].count], default=0.0)
        if values[option] * answer.rate >= smaller * menu.rates[row, option]:
            if seat(draft, job, offers[option], apart=True, batch_size=answer.batch_size):
                return
        if seat(draft, job, offers[option], batch_size=int(menu.batches[row, option])):
            return


def _tune(draft: Draft, menu: Menu, row: int, job: Job) -> None:
    """Give a job that stays the batch size that is best now."""
    held = job.desired
    if held is None or not menu.batches[row, menu.held[row]]:
        return
    batch = int(menu.batches[row, menu.held[row]])
    if menu.stay_rates[row] != menu.rates[row, menu.held[row]]:
        batch = ask_apart(draft.view, job, menu.offers[menu.held[row]]).batch_size
    if batch != held.batch_size:
        draft.assign(job, held._replace(batch_size=batch))


def _at(stays: Floats, held: Choice, shape: tuple[int, ...]) -> Floats:
    """A matrix with what staying is worth in its place."""
    matrix = np.zeros(shape)
    rows = np.flatnonzero(held != NONE)
    matrix[rows, held[rows]] = stays[rows]
    return matrix


def _note_widths(draft: Draft, menu: Menu, tried: dict[str, int]) -> None:
    """Remember the most devices each job has had."""
    for job in menu.jobs:
        held = draft.holding(job)
        if held is not None:
            tried[job.id] = max(tried.get(job.id, 0), held.num_devices)


def _listed(menu: Menu, prices: Floats) -> str:
    return ", ".join([f"{price:.3g} ({kind})" for kind, price in zip(menu.kinds, prices, strict=True)])
