"""Selects the groups to measure: every pair, and random pairs, triples, quadruples and larger groups."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from random import Random
from typing import NamedTuple

from colocation.tasks import Task


class Member(NamedTuple):
    """A task at a share, in a group."""

    task: Task
    share: int


Group = tuple[Member, ...]
_DRAWN = ((2, 34), (3, 30), (4, 20), (5, 4), (6, 3))  # size of a group, how many of each


def groups(wave: Sequence[Task], shares: Sequence[int], rng: Random) -> list[Group]:
    """Every pair at the whole device, then groups with drawn shares, equal ones in half of them; shuffled."""
    found: dict[Group, None] = {(Member(a, shares[0]), Member(b, shares[0])): None for a, b in combinations(wave, 2)}
    for size, count in _DRAWN:
        if size > len(wave):
            continue
        for number in range(count):
            tasks = rng.sample(list(wave), size)
            equal = rng.choice(list(shares))
            drawn = [equal if number % 2 == 0 else rng.choice(list(shares)) for _ in tasks]
            found[tuple(Member(*pair) for pair in zip(tasks, drawn, strict=True))] = None
    for task in wave[:4]:  # two of a kind
        found[Member(task, shares[0]), Member(task, shares[1])] = None
    order = list(found)
    rng.shuffle(order)
    return order
