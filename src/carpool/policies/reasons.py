"""Why a job holds what it holds, or waits, in one sentence with the prices in it."""

from __future__ import annotations

import numpy as np

from carpool.core.model import Job
from carpool.policies.known import Offer
from carpool.policies.options import Menu, shape_of
from carpool.policies.prices import Floats, Market

_ORDINALS = ("", "first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")


def listed(menu: Menu, prices: Floats) -> str:
    """Such as ``0.04 for a V100 and 0.01 for a K80``."""
    return " and ".join(
        [f"{amount(price)} for a {kind}" for kind, price in zip(menu.cluster.kinds, prices, strict=True)]
    )


def amount(price: float) -> str:
    """A price in two digits; one that is as good as none is 0."""
    return f"{price:.2g}" if price >= 1e-4 else "0"


def holds(menu: Menu, market: Market, prices: Floats, row: int, offer: Offer) -> str:
    """Such as ``holds 3 V100 at price 0.04; a fourth would save 210 s and cost 260 s``."""
    kind, count = offer.groups[0]
    price = float(prices[menu.cluster.kinds.index(kind)])
    told = f"holds {offer.words()} at price {amount(price)}"
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


def waits(menu: Menu, worths: Floats, prices: Floats, row: int) -> str:
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
        return (
            f"waits although it would pay {amount(pays)} for {offer.words()} at {amount(price)}: they cannot be had now"
        )
    return f"waits: {offer.words()} cost{'' if each else 's'} {amount(price)}{each}, it would pay {amount(pays)}"


def about(menu: Menu, market: Market, worths: Floats, prices: Floats, job: Job) -> str:
    """The sentence for one job as it stands."""
    row = next(row for row, other in enumerate(menu.jobs) if other.id == job.id)
    if job.desired is None:
        return waits(menu, worths, prices, row)
    told = holds(menu, market, prices, row, shape_of(menu.cluster, job.desired))
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
