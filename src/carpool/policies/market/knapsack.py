"""Multiple-choice knapsack: one option per job, maximum total value within the devices of each type.

A multiple-choice knapsack in as many dimensions as there are kinds. What everybody would take at the clearing prices
is right for all but those at the margin. It is filled up by value per price; then the jobs nearest to the margin, as
many as an exact solution can be afforded for, are dealt again by dynamic programming. Small markets are exact as a
whole.
"""

from __future__ import annotations

from math import prod

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
InputPlan = NDArray[np.intp]  # [job]: its option, or NONE

NONE = -1
_STEPS = 1_500_000  # elementary steps of the exact part
_PASSES = 6  # of filling up
_TINY = 1e-12  # a price above none


def solve_knapsack(values: Floats, needs: Floats, supply: Floats, prices: Floats) -> InputPlan:
    """The option of each job; `values` [job, option] are 0 where the job cannot have it, `needs` are whole numbers."""
    costs = needs @ prices
    surplus = np.where(values > 0.0, values - costs, -np.inf)
    choice, gaps = _at_prices(surplus)
    left = _fit(choice, surplus, needs, supply)
    _fill(choice, left, values, needs, prices)
    core = _core(gaps, values, needs, supply)
    if len(core):
        held = [choice[job] for job in core if choice[job] != NONE]
        room = left + needs[held].sum(axis=0)
        choice[core] = exact(values[core], needs, room)
        left = room - needs[[option for option in choice[core] if option != NONE]].sum(axis=0)
        _fill(choice, left, values, needs, prices)
    return choice


def exact(values: Floats, needs: Floats, supply: Floats) -> InputPlan:
    """The best deal of all, by dynamic programming over what is left of every kind."""
    able = _contenders(values, needs, supply)
    if len(able) < len(values):
        picked = np.full(len(values), NONE, np.intp)
        picked[able] = exact(values[able], needs, supply)
        return picked
    widest = needs.max(axis=0) * len(values)
    shape = tuple(int(min(there, wanted)) + 1 for there, wanted in zip(supply, widest, strict=True))
    best = np.zeros(shape)
    choices: list[NDArray[np.int16]] = []
    amounts = [tuple(map(int, row)) for row in needs]
    for row in values:
        found, chosen = best, np.full(shape, NONE, np.int16)
        for option in np.flatnonzero(row > 0.0):
            amount = amounts[option]
            if any(need >= size for need, size in zip(amount, shape, strict=True)):
                continue
            taken = tuple(slice(need, None) for need in amount)
            before = tuple(slice(0, size - need) for need, size in zip(amount, shape, strict=True))
            total = best[before] + row[option]
            better = total > found[taken]
            if better.any():
                found = found.copy() if found is best else found
                found[taken] = np.where(better, total, found[taken])
                chosen[taken][better] = option
        best = found
        choices.append(chosen)
    spot = [size - 1 for size in shape]
    picked = np.full(len(values), NONE, np.intp)
    for job in range(len(values) - 1, -1, -1):
        picked[job] = choices[job][tuple(spot)]
        if picked[job] != NONE:
            spot = [there - need for there, need in zip(spot, amounts[picked[job]], strict=True)]
    return picked


def _contenders(values: Floats, needs: Floats, supply: Floats) -> InputPlan:
    """The jobs that can be in the best deal: those who pay most for some option, as many as can be served at all.

    A job that takes an option for which so many others would pay more can be replaced by one of them that has nothing.
    Among equals the first ones count.
    """
    most = int(supply.sum() // needs.sum(axis=1).min(initial=np.inf))
    if len(values) <= 2 * most * len(needs):
        return np.arange(len(values))
    order = np.argsort(-values, axis=0, kind="stable")[:most]
    return np.unique(order)


def _at_prices(surplus: Floats) -> tuple[InputPlan, Floats]:
    """What each job takes at the prices, and by how much it prefers that to its second choice."""
    jobs = np.arange(len(surplus))
    with_none = np.concatenate([surplus, np.zeros((len(surplus), 1))], axis=1)
    choice = with_none.argmax(axis=1)
    best = with_none[jobs, choice]
    with_none[jobs, choice] = -np.inf
    gaps = best - with_none.max(axis=1)
    return np.where(choice == surplus.shape[1], NONE, choice).astype(np.intp), gaps


def _fit(choice: InputPlan, surplus: Floats, needs: Floats, supply: Floats) -> Floats:
    """Let those who lose least by it take something else than what there is not enough of; what is left."""
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
    amounts, room = needs.tolist(), left.tolist()
    who, options, kept = jobs.tolist(), instead.tolist(), (worth > 0.0).tolist()
    for place in np.argsort(losses, kind="stable").tolist():
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


def _fill(choice: InputPlan, left: Floats, values: Floats, needs: Floats, prices: Floats) -> None:
    """Give what is left to whom it is worth most for its price, one step for each job in every pass."""
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


def _core(gaps: Floats, values: Floats, needs: Floats, supply: Floats) -> InputPlan:
    """The jobs nearest to the margin, as many as an exact solution can be afforded for."""
    order = np.argsort(gaps, kind="stable")
    num = len(order)
    options = max(1, int(np.count_nonzero(values, axis=1).max(initial=0)))
    widest = needs.max(axis=0)
    while num > 1:
        states = prod(int(min(there, wide * num)) + 1 for there, wide in zip(supply, widest, strict=True))
        if states * options * num <= _STEPS:
            break
        num = num * 3 // 4
    return np.sort(order[:num]).astype(np.intp) if num > 1 else order[:0]
