"""Explanations of the market's decisions: reasons of plans, and prices in `carpool why --verbose`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from carpool.core.model import Allocation, Job, JobId
from carpool.policies.market.aging import aged
from carpool.policies.market.knapsack import NONE
from carpool.policies.market.menu import Menu, shape_of
from carpool.policies.market.policy_memory import Offer
from carpool.policies.market.prices import Floats, Market


class Quote(NamedTuple):
    """A menu with its prices."""

    menu: Menu
    market: Market
    prices: Floats  # [kind]
    worths: Floats  # [job]: λ
    credit: Floats  # [job]: of waiting, see `aging`
    overdue: Floats  # [job]: further credit


_NAMED = 3  # jobs that an explanation names
_FELT = 1.1  # factor on a weight from which it is named
_LEAST_PRICE = 1e-4  # below, a price is shown as 0


def explain_job(quote: Quote, job: Job, holding: Callable[[Job], Allocation | None]) -> str:
    """Why a job waits, or holds what `holding` says, at the current prices."""
    menu = quote.menu
    row = next(row for row, other in enumerate(menu.jobs) if other.id == job.id)
    held = holding(job)
    if held is None:
        return _explain_waiting(quote, row, holding)
    part = "" if held.fractions == (1.0,) else f"{held.shares[0].fraction:.0%} of "
    words = _explain_holding(quote, row, shape_of(menu.cluster, held), part)
    return words if held.batch_size in (0, job.spec.batch_size) else f"{words}; batch size {held.batch_size}"


def bid_order(quote: Quote) -> list[JobId]:
    """The waiting jobs, the one that gains most from a device first."""
    menu = quote.menu
    bids = (quote.worths[:, None] * menu.rates / menu.needs.sum(axis=1)).max(axis=1)
    waiting = np.flatnonzero(menu.held == NONE)
    return [menu.jobs[row].id for row in waiting[np.argsort(-bids[waiting], kind="stable")].tolist()]


def explain_aging(quote: Quote, job: Job) -> str:
    """How much waiting has raised a job's weight; empty if that is negligible."""
    row = next(row for row, other in enumerate(quote.menu.jobs) if other.id == job.id)
    factor = aged(np.ones(1), quote.credit[row, None] + quote.overdue[row, None])[0]
    return f"waiting has raised its weight {factor:.1f} times" if factor >= _FELT else ""


def explain_prices(quote: Quote) -> str:
    """Such as ``one more V100 would save all jobs together 0.04 s per second, one more K80 0.01 s``."""
    kinds = zip(quote.menu.cluster.kinds, quote.prices.tolist(), strict=True)
    priced = [(kind, _price(price)) for kind, price in kinds if price >= _LEAST_PRICE]
    if not priced:
        return "more devices would not help"
    (kind, price), *others = priced
    listed = [f"one more {kind} would save all jobs together {price} s per second"]
    return ", ".join([*listed, *[f"one more {kind} {price} s" for kind, price in others]])


def _explain_holding(quote: Quote, row: int, offer: Offer, part: str) -> str:
    """Such as ``holds 3 V100 (each would save other jobs 0.04 s per second); one more would save it 210 s and …``."""
    menu, market = quote.menu, quote.market
    kind, count = offer.groups[0]
    price = float(quote.prices[menu.cluster.kinds.index(kind)])
    others = f"{'each' if count > 1 else 'it'} would save other jobs {_price(price)} s per second"
    words = f"holds {part}{offer.words()} ({others if price >= _LEAST_PRICE else 'no other job needs more'})"
    column = menu.offers.index(offer)
    more = _next_larger(menu, row, offer)
    if more is None or not menu.rates[row, column]:
        return words
    now_s, then_s = market.work[row] * market.per_unit[row, [column, more]]
    saved = float(market.weights[row] * (now_s - then_s))
    extra = menu.offers[more].width
    cost = max(0.0, price * (extra * then_s - count * now_s))
    which = f"{extra - count} more" if extra > count + 1 else "one more"
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
    but = "no fitting devices are free now" if own >= price else f"would save other jobs {_price(price)} s"
    return f"waits for {offer.words()}{_holders(menu, offer, holding)}: {saving}, but {but}"


def _holders(menu: Menu, offer: Offer, holding: Callable[[Job], Allocation | None]) -> str:
    """Such as `` held by a, b, c and 2 more``: the jobs on devices of the offer's types."""
    kinds = {kind for kind, _ in offer.groups}
    held = [(job.id, own) for job in menu.jobs if (own := holding(job)) is not None]
    is_alike = len(menu.cluster.kinds) == 1
    names = [name for name, own in held if is_alike or kinds & {kind for kind, _ in shape_of(menu.cluster, own).groups}]
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
