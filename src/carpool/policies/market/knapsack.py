"""Multiple-choice knapsack: one option per job, maximum total value within the devices of each type.

The knapsack has one dimension per device type. What each job prefers at the clearing prices is right except near the
margin. The rest is filled by value per price; then the jobs nearest to the margin, as many as time allows, are assigned
again by exact dynamic programming. Small markets are solved exactly as a whole.
"""

from __future__ import annotations

from math import prod

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Choices = NDArray[np.intp]  # [job]: its option, or NONE

NONE = -1
_STEPS = 1_500_000  # budget of the exact part
_CORE = 64  # most jobs of the exact part
_PASSES = 6  # that fill up remaining devices
_TINY = 1e-12  # least price
_OPTIMAL = 1.0 - 1e-9  # part of the upper bound, beyond which rounding hides what could be gained


def solve_knapsack(values: Floats, needs: Floats, supply: Floats, prices: Floats) -> Choices:
    """The option of each job; `values` [job, option] are 0 where impossible, `needs` [option, kind] are integers."""
    wanted = _best_of_all(values)
    if (needs[wanted[wanted != NONE]].sum(axis=0) <= supply).all():
        return wanted  # nothing is scarce
    costs = needs @ prices
    surplus = np.where(values > 0.0, values - costs, -np.inf)
    choice, gaps = _at_prices(surplus)
    best = surplus.max(axis=1).clip(0.0).sum() + supply @ prices  # an upper bound on the worth of any assignment
    left = _fit(choice, surplus, needs, supply)
    _fill(choice, left, values, needs, prices)
    runs = np.flatnonzero(choice != NONE)
    if values[runs, choice[runs]].sum() >= best * _OPTIMAL:
        return choice
    core = _core(gaps, values, needs, supply)
    if len(core):
        held = [choice[job] for job in core if choice[job] != NONE]
        room = left + needs[held].sum(axis=0)
        choice[core] = exact(values[core], needs, room)
        left = room - needs[[option for option in choice[core] if option != NONE]].sum(axis=0)
        _fill(choice, left, values, needs, prices)
    return choice


def _best_of_all(values: Floats) -> Choices:
    """Each job's option of highest value."""
    best = values.argmax(axis=1)
    return np.where(values[np.arange(len(values)), best] > 0.0, best, NONE).astype(np.intp)


def exact(values: Floats, needs: Floats, supply: Floats) -> Choices:
    """The optimal assignment, by dynamic programming over the remaining devices of each type."""
    able = _contenders(values, needs, supply)
    if len(able) < len(values):
        picked = np.full(len(values), NONE, np.intp)
        picked[able] = exact(values[able], needs, supply)
        return picked
    widest = needs.max(axis=0) * len(values)
    shape = tuple(int(min(there, wanted)) + 1 for there, wanted in zip(supply, widest, strict=True))
    best = np.zeros(shape)
    choices: NDArray[np.int16] = np.full((len(values), *shape), NONE, np.int16)
    amounts = [tuple(map(int, row)) for row in needs]
    fits = [all(need < size for need, size in zip(amount, shape, strict=True)) for amount in amounts]
    taken = [tuple([slice(need, None) for need in amount]) for amount in amounts]
    before = [tuple([slice(0, max(0, size - need)) for need, size in zip(a, shape, strict=True)]) for a in amounts]
    fitting = [option for option, fit in enumerate(fits) if fit]
    for row, is_able, chosen in zip(values.tolist(), (values > 0.0).tolist(), choices, strict=True):
        open_to = [option for option in fitting if is_able[option]]
        totals = [best[before[option]] + row[option] for option in open_to]  # all without this job
        for option, total in zip(open_to, totals, strict=True):
            there = best[taken[option]]
            chosen[taken[option]][total > there] = option
            np.maximum(total, there, out=there)
    spot = [size - 1 for size in shape]
    picked = np.full(len(values), NONE, np.intp)
    for job in range(len(values) - 1, -1, -1):
        picked[job] = choices[job][tuple(spot)]
        if picked[job] != NONE:
            spot = [there - need for there, need in zip(spot, amounts[picked[job]], strict=True)]
    return picked


def _contenders(values: Floats, needs: Floats, supply: Floats) -> Choices:
    """Jobs that can be in the optimal assignment: for each option the highest bidders, as many as can run at all.

    Any other job can be replaced by a higher bidder that has nothing. Ties go to the first.
    """
    most = int(supply.sum() // needs.sum(axis=1).min(initial=np.inf))
    if len(values) <= 2 * most * len(needs):
        return np.arange(len(values))
    order = np.argsort(-values, axis=0, kind="stable")[:most]
    return np.unique(order)


def _at_prices(surplus: Floats) -> tuple[Choices, Floats]:
    """Each job's preferred option at the prices, and its lead over the second choice."""
    jobs = np.arange(len(surplus))
    with_none = np.concatenate([surplus, np.zeros((len(surplus), 1))], axis=1)
    choice = with_none.argmax(axis=1)
    best = with_none[jobs, choice]
    with_none[jobs, choice] = -np.inf
    gaps = best - with_none.max(axis=1)
    return np.where(choice == surplus.shape[1], NONE, choice).astype(np.intp), gaps


def _fit(choice: Choices, surplus: Floats, needs: Floats, supply: Floats) -> Floats:
    """Move jobs off overbooked device types, those that lose least first; returns the remaining devices."""
    jobs = np.flatnonzero(choice != NONE)
    left = supply - needs[choice[jobs]].sum(axis=0)
    if (left >= 0.0).all():
        return np.asarray(left)
    is_short = needs[:, left < 0.0].sum(axis=1)
    jobs = jobs[is_short[choice[jobs]] > 0.0]
    others = np.where(is_short > 0.0, -np.inf, surplus[jobs])
    instead = others.argmax(axis=1)
    worth = np.maximum(others[np.arange(len(jobs)), instead], 0.0)
    losses = (surplus[jobs, choice[jobs]] - worth) / is_short[choice[jobs]]
    if len(left) == 1:  # no option does without the only device type
        order = jobs[np.lexsort((-jobs, losses))]
        gained = left[0] + np.cumsum(needs[choice[order], 0])
        leaving = order[: int(np.argmax(gained >= 0.0)) + 1] if gained[-1] >= 0.0 else order
        choice[leaving] = NONE
        return np.array([gained[len(leaving) - 1]])
    amounts, room = needs.tolist(), left.tolist()
    who, options, kept = jobs.tolist(), instead.tolist(), (worth > 0.0).tolist()
    for place in np.lexsort((-jobs, losses)).tolist():  # of equal losses the last job's first
        job, option = who[place], options[place]
        has = amounts[choice[job]]
        if not any(need > 0.0 > there for need, there in zip(has, room, strict=True)):
            continue
        room = [there + need for need, there in zip(has, room, strict=True)]
        choice[job] = NONE
        if kept[place] and all(need <= there for need, there in zip(amounts[option], room, strict=True)):
            choice[job] = option
            room = [there - need for need, there in zip(amounts[option], room, strict=True)]
        if min(room) >= 0.0:
            break
    return np.array(room)


def _fill(choice: Choices, left: Floats, values: Floats, needs: Floats, prices: Floats) -> None:
    """Assign remaining devices where value per price is highest, one step per job in every pass."""
    jobs = np.arange(len(choice))
    costs = needs @ np.maximum(prices, prices.max(initial=0.0) * 1e-3 + _TINY)
    for _ in range(_PASSES):
        if not left.any():
            return
        has = choice != NONE
        gains = values - np.where(has, values[jobs, choice], 0.0)[:, None]
        more = np.where(has[:, None], needs[choice], 0.0)
        able = gains > 0.0
        for kind, there in enumerate(left):
            able &= needs[:, kind] - more[:, kind, None] <= there
        extra = np.maximum(costs - np.where(has, costs[choice], 0.0)[:, None], _TINY)
        densities = np.where(able, gains / extra, 0.0)
        best = densities.argmax(axis=1)
        density = densities[jobs, best]
        steps = (needs[best] - more).tolist()
        room = left.tolist()
        changed = False
        for job in np.argsort(-density, kind="stable")[: np.count_nonzero(density)].tolist():
            after = [there - step for step, there in zip(steps[job], room, strict=True)]
            if min(after) >= 0.0:
                room = after
                choice[job] = best[job]
                changed = True
        left[:] = room
        if not changed:
            return


def _core(gaps: Floats, values: Floats, needs: Floats, supply: Floats) -> Choices:
    """The jobs nearest to the margin, as many as the exact solution can afford."""
    order = np.argsort(gaps, kind="stable")
    num = min(len(order), _CORE)
    options = max(1, int(np.count_nonzero(values, axis=1).max(initial=0)))
    widest = needs.max(axis=0)
    while num > 1:
        states = prod(int(min(there, wide * num)) + 1 for there, wide in zip(supply, widest, strict=True))
        if states * options * num <= _STEPS:
            break
        num = num * 3 // 4
    return np.sort(order[:num]).astype(np.intp) if num > 1 else order[:0]
