"""Jobs that share devices: two that would pay more together than apart become a party and are dealt with as one.

At prices μ a job alone has the surplus s_j = max over o of λ_j · g_j(o) − μ·c_o, or 0. Jobs on the same devices slow
each other down, but pay for the devices only once: s_P = max over o of Σ λ_j · g_j(o beside the others) − μ·c_o. The pair with the largest s_P − s_a − s_b above 0 is joined first. It all rests on what the estimator believes of
neighbours: where it expects no more than turns by fraction, nobody gains and nobody shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from carpool.core.model import Job, Kind
from carpool.core.policy import Snapshot
from carpool.core.topology import Neighbour, Placement
from carpool.policies.knapsack import NONE
from carpool.policies.options import Floats, Menu
from carpool.policies.speeds import placed_on

_LITTLE = 1e-6  # a gain that is no rounding
_MOST = 96  # parties looked at, those that would pay most for a device first: the work grows with the square

Likes = tuple[object, ...]
Known = dict[tuple[Likes, Kind, tuple[Likes, ...]], float]  # rates beside others, by what the jobs are like


class Party(NamedTuple):
    """Rows of the jobs that share devices, and what the party would pay for each offer."""

    rows: tuple[int, ...]
    values: Floats
    stays_at: int = NONE  # the offer that it has already and would stay with

    @property
    def fraction(self) -> float:
        """Of each device, for each of them."""
        return 1.0 / len(self.rows)


def join(
    view: Snapshot,
    menu: Menu,
    worths: Floats,
    values: Floats,
    stays: Floats,
    prices: Floats,
    *,
    most: int,
    known: Known,
) -> list[Party]:
    """Parties of up to `most` jobs. `values` are of moving somewhere alone, `stays` of staying where a job is."""
    company = [_company(view, menu, job) for job in menu.jobs]
    parties = [_with_stay(menu, (row,), own, stays, company) for row, own in enumerate(values)]
    costs = menu.needs @ prices
    able = [row for row, job in enumerate(menu.jobs) if not job.spec.exact and values[row].any()]
    dearest = (values / menu.needs.sum(axis=1)).max(axis=1)
    looked_at = sorted(able, key=lambda row: (-dearest[row], row))[:_MOST]
    table = _Table(view, menu, worths, known)
    for size in range(2, most + 1):
        found: list[tuple[float, int, int, Party]] = []
        surplus = {row: _surplus(parties[row].values, costs) for row in looked_at}
        for a, b in combinations(looked_at, 2):
            rows = tuple(sorted(parties[a].rows + parties[b].rows))
            joint = table.joint(rows) if len(rows) <= size and table.width(a) == table.width(b) else None
            if joint is None:
                continue
            party = _with_stay(menu, rows, joint, stays, company)
            gain = _surplus(party.values, costs) - surplus[a] - surplus[b]
            if gain > _LITTLE * surplus[a]:
                found.append((gain, a, b, party))
        for _, a, b, party in sorted(found, key=lambda pair: (-pair[0], pair[1], pair[2])):
            if parties[a].rows and parties[b].rows and len(parties[a].rows) + len(parties[b].rows) == len(party.rows):
                parties[a], parties[b] = party, Party((), party.values)
        looked_at = [row for row in looked_at if parties[row].rows]
    return [party for party in parties if party.rows]


def _with_stay(menu: Menu, rows: tuple[int, ...], values: Floats, stays: Floats, company: Sequence[set[int]]) -> Party:
    """A party; if it is together already, staying counts for what it saves."""
    if menu.held[rows[0]] == NONE or any(company[row] != set(rows) for row in rows):
        return Party(rows, values)
    column = int(menu.held[rows[0]])
    stay = stays[rows[0]]
    if len(rows) > 1:  # what staying alone is worth over moving there, for all of them
        stay = values[column] * (1.0 + _LITTLE)
    if stay < values[column]:
        return Party(rows, values)
    values = values.copy()
    values[column] = stay
    return Party(rows, values, column)


class _Table:
    """Rates beside others, asked once for jobs that are alike."""

    def __init__(self, view: Snapshot, menu: Menu, worths: Floats, known: Known) -> None:
        self._view = view
        self._menu = menu
        self._worths = worths
        self._known = known
        self._likes = [_likes(job) for job in menu.jobs]
        self._columns: dict[int, list[tuple[Kind, int]]] = {}

    def width(self, row: int) -> int:
        """Devices that a job would share."""
        return self._menu.jobs[row].spec.narrowest

    def joint(self, rows: Sequence[int]) -> NDArray[np.float64] | None:
        """What jobs together would pay for each offer of their width; None if they fit nowhere together."""
        menu, width = self._menu, self.width(rows[0])
        values = np.zeros(len(menu.offers))
        for kind, column in self._offers(width):
            memory = sum([menu.jobs[row].spec.memory_bytes for row in rows])
            there = self._view.cluster.least_memory.get(kind, 0)
            if (there and memory > there) or not all(menu.rates[row, column] for row in rows):
                continue
            paid = [self._worths[row] * self._rate(row, rows, kind, width) for row in rows]
            values[column] = sum(paid) if min(paid) > 0.0 else 0.0
        return values if values.any() else None

    def _offers(self, width: int) -> list[tuple[Kind, int]]:
        found = self._columns.get(width)
        if found is None:
            found = self._columns[width] = [
                (offer.groups[0][0], column)
                for column, offer in enumerate(self._menu.offers)
                if len(offer.groups) == 1 and offer.count == width
            ]
        return found

    def _rate(self, row: int, rows: Sequence[int], kind: Kind, width: int) -> float:
        others = [other for other in rows if other != row]
        key = (self._likes[row], kind, tuple([self._likes[other] for other in others]))
        rate = self._known.get(key)
        if rate is None:
            jobs, fraction = self._menu.jobs, 1.0 / len(rows)
            neighbours = tuple([Neighbour(jobs[other].spec, fraction) for other in others])
            groups = placed_on(self._view.cluster, kind, width).groups
            placement = Placement(groups, fraction, 0, neighbours)
            rate = self._known[key] = self._view.estimates.rate(jobs[row].spec, placement).mean
        return rate


def _likes(job: Job) -> Likes:
    """Jobs that are alike in this slow each other down alike; a job without a model is like no other."""
    spec = job.spec
    return (spec.model or spec.id, spec.batch_size, spec.devices, spec.narrowest)


def _surplus(values: Floats, costs: Floats) -> float:
    return max(0.0, float(np.max(values - costs)))


def _company(view: Snapshot, menu: Menu, job: Job) -> set[int]:
    """Rows of the jobs on the devices of a job, its own included; empty where they share only some of them."""
    held = job.desired
    if held is None:
        return set()
    there = {tuple([r.job for r in view.occupancy.residents(device)]) for device in held.devices()}
    if len(there) > 1:
        return set()
    ids = set(next(iter(there)))
    if held.fractions != (1.0 / len(ids),) and not job.lane:
        return set()
    return {row for row, other in enumerate(menu.jobs) if other.id in ids}
