"""Which jobs get how many devices on which nodes: an exact knapsack over counts, then a seeded search over placements.

The sum of all jobs' costs is made small. A knapsack finds the best number of devices for every job; the numbers are
then packed onto nodes, as tightly as possible and with jobs staying where they are. Where the packing falls short of
the numbers, parts of the placement are torn down and solved again (large-neighbourhood search): a few random jobs, or
all that touch a few random nodes. A part is replaced only by one that costs less.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import inf
from random import Random

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Row = tuple[tuple[int, int], ...]  # (node, devices) pairs by ascending node: where a job sits

_STAYERS_FIRST = 0.8  # how often who may stay is placed before who moves, and not the other way round
_LESS = 1e-12  # a replacement has to be better by more than rounding


@dataclass(frozen=True, slots=True)
class Stake:
    """One job's costs by number of devices, 0 included."""

    local: Floats  # on one node, if it has to move there; infinite where that is not allowed
    spread: Floats  # over several nodes
    stay: float  # if it keeps what it has, which may be nothing
    held: Row = ()

    @property
    def width(self) -> int:
        """Devices it holds."""
        return sum([count for _, count in self.held])

    def cost(self, row: Row) -> float:
        """What a placement costs."""
        if row == self.held:
            return self.stay
        return float((self.spread if len(row) > 1 else self.local)[sum([count for _, count in row])])


def search(sizes: Sequence[int], stakes: Sequence[Stake], random: Random, iterations: int) -> list[Row]:
    """A place for each job on nodes of the given sizes; an empty one for those that get nothing."""
    room = _Search(sizes, stakes, random)
    rows = [stake.held for stake in stakes]
    costs = [stake.stay for stake in stakes]
    everybody = range(len(stakes))
    for step in range(1 + (iterations if len(stakes) > 1 else 0)):
        torn = room.neighbourhood(rows) if step else everybody
        found = room.rebuild(rows, torn)
        found_costs = {job: stakes[job].cost(row) for job, row in found.items()}
        if sum(found_costs.values()) < sum([costs[job] for job in torn]) - _LESS:
            for job, row in found.items():
                rows[job], costs[job] = row, found_costs[job]
    return rows


class _Free:
    """Devices left on each node, and where a job over several nodes sits: two of these on one node would interfere."""

    __slots__ = ("_is_spread", "left")

    def __init__(self, sizes: Sequence[int]) -> None:
        self.left = list(sizes)
        self._is_spread = [False] * len(sizes)

    def take(self, row: Row) -> None:
        for node, count in row:
            self.left[node] -= count
            if len(row) > 1:
                self._is_spread[node] = True

    def fits(self, row: Row) -> bool:
        is_spread = len(row) > 1
        return all(self.left[node] >= count and not (is_spread and self._is_spread[node]) for node, count in row)

    def find(self, count: int, random: Random) -> Row | None:
        """`count` devices on the fullest node that has them, else on as few nodes as possible."""
        left = self.left
        best = min([(free, node) for node, free in enumerate(left) if free >= count], default=None)
        if best is not None:
            return ((best[1], count),)
        open_nodes = [node for node, free in enumerate(left) if free and not self._is_spread[node]]
        if sum([left[node] for node in open_nodes]) < count:
            return None
        open_nodes.sort(key=lambda node: (-left[node], random.random()))
        row: list[tuple[int, int]] = []
        for place, node in enumerate(open_nodes):
            if left[node] >= count:  # the rest goes where it leaves least over
                rest = min([(left[other], other) for other in open_nodes[place:] if left[other] >= count])[1]
                return tuple(sorted([*row, (rest, count)]))
            row.append((node, left[node]))
            count -= left[node]
        return None


class _Search:
    """The jobs, their costs, and the moves of the search."""

    __slots__ = ("_options", "_random", "_sizes", "_stakes")

    def __init__(self, sizes: Sequence[int], stakes: Sequence[Stake], random: Random) -> None:
        self._sizes = sizes
        self._stakes = stakes
        self._random = random
        largest = max(sizes, default=0)
        self._options = [  # costs when packed tightly
            np.concatenate((stake.local[: largest + 1], stake.spread[largest + 1 :])) for stake in stakes
        ]

    def neighbourhood(self, rows: Sequence[Row]) -> Collection[int]:
        """Jobs to place anew: a few of any, or all on a few nodes together with those that have nothing."""
        random, num = self._random, len(rows)
        if random.random() < 0.5:
            return set(random.sample(range(num), min(num, random.randint(2, 6))))
        nodes = set(random.sample(range(len(self._sizes)), min(len(self._sizes), random.randint(2, 4))))
        torn = {job for job, row in enumerate(rows) if not row or any(node in nodes for node, _ in row)}
        return torn | {random.randrange(num)}

    def rebuild(self, rows: Sequence[Row], torn: Collection[int]) -> dict[int, Row]:
        """The best numbers for the torn jobs in what the others leave, packed: who keeps its number stays if it can."""
        stakes, free = self._stakes, _Free(self._sizes)
        for job, row in enumerate(rows):
            if job not in torn:
                free.take(row)
        order = sorted(torn)
        self._random.shuffle(order)
        stays = {job for job in order if stakes[job].held and free.fits(stakes[job].held)}
        wanted = self._numbers(order, stays, sum(free.left))
        found: dict[int, Row] = dict.fromkeys(order, ())
        stayers = [job for job in order if job in stays and wanted[job] == stakes[job].width]
        movers = sorted([job for job in order if wanted[job] and job not in stayers], key=lambda job: -wanted[job])
        for job in stayers + movers if self._random.random() < _STAYERS_FIRST else movers + stayers:
            held = stakes[job].held
            if job in stayers and free.fits(held):
                found[job] = held
            else:
                place = free.find(wanted[job], self._random)
                found[job] = self._second_best(job, wanted[job], free) if place is None else place
            free.take(found[job])
        return found

    def _numbers(self, order: Sequence[int], stays: Collection[int], capacity: int) -> dict[int, int]:
        """Multiple-choice knapsack: how many devices each job should have."""
        best = np.zeros(capacity + 1)
        choices: list[NDArray[np.intp]] = []
        for job in order:
            stake, costs = self._stakes[job], self._options[job][: capacity + 1]
            if stake.width == 0 or job in stays:
                costs = costs.copy()
                costs[stake.width] = min(costs[stake.width], stake.stay)
            before = np.concatenate((np.full(len(costs) - 1, inf), best))
            totals = sliding_window_view(before, len(costs))[:, ::-1] + costs  # [devices so far, devices of this job]
            choices.append(totals.argmin(axis=1))
            best = totals[np.arange(capacity + 1), choices[-1]]
        wanted: dict[int, int] = {}
        for job, choice in zip(reversed(order), reversed(choices), strict=True):
            wanted[job] = int(choice[capacity])
            capacity -= wanted[job]
        return wanted

    def _second_best(self, job: int, wanted: int, free: _Free) -> Row:
        """The cheapest place that is left with at most so many devices."""
        stake = self._stakes[job]
        row: Row = ()
        cost = float(stake.local[0])
        if stake.held and stake.stay < cost and free.fits(stake.held):
            row, cost = stake.held, stake.stay
        for count in range(1, min(wanted, sum(free.left)) + 1):
            found = free.find(count, self._random) if self._options[job][count] < inf else None
            if found is not None and stake.cost(found) < cost:
                row, cost = found, stake.cost(found)
        return row
