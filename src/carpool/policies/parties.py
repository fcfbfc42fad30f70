"""Jobs that share devices: two that would pay more together than apart become a party and are dealt with as one.

At prices μ a job alone has the surplus s_j = max over o of λ_j · g_j(o) − μ·c_o, or 0. Jobs on the same devices slow
each other down, but pay for the devices only once: s_P = max over o of Σ λ_j · g_j(o beside the others) − μ·c_o. Whose
s_P − s_a − s_b is largest and above 0 are joined first. It all rests on what the estimator believes of neighbours:
where it expects no more than turns by fraction, nobody gains and nobody shares.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, combinations_with_replacement, product
from typing import NamedTuple

import numpy as np

from carpool.core.model import Job, JobId, JobSpec, Kind
from carpool.core.policy import Snapshot
from carpool.core.topology import Neighbour, Placement
from carpool.policies.batch_tuning import KnowsBatches
from carpool.policies.goodput import KnowsGoodput, worth_of_step
from carpool.policies.knapsack import NONE, Floats
from carpool.policies.known import Known
from carpool.policies.options import Menu
from carpool.policies.speeds import placed_on

_LITTLE = 1e-6  # a gain that is no rounding
_MARGIN = 1.1  # on the memory of a batch that is tuned
_MOST = 96  # parties looked at, those that would pay most for a device first: the work grows with the square

Likes = tuple[str, int, int, int]


class Party(NamedTuple):
    """Rows of the jobs that share devices, and what the party would pay for each offer."""

    rows: tuple[int, ...]
    values: Floats
    stays_at: int = NONE  # the offer that it has already and would stay with
    batches: Mapping[int, Sequence[int]] = {}  # by offer, of each row; those alone are the menu's

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
    rows_of = {job.id: row for row, job in enumerate(menu.jobs)}
    company = [_company(view, rows_of, job) for job in menu.jobs]
    parties = _alone(menu, values, stays, company)
    costs = menu.needs @ prices
    is_wanted = np.asarray(values.any(axis=1))
    able = [row for row, job in enumerate(menu.jobs) if is_wanted[row] and not job.spec.exact]
    dearest = (values / menu.needs.sum(axis=1)).max(axis=1)
    looked_at = sorted(able, key=lambda row: (-dearest[row], row))[:_MOST]
    table = _Table(view, menu, worths, known)
    for size in range(2, 1 if isinstance(view.estimates, KnowsGoodput) else most + 1):
        found: list[tuple[float, int, int, Party]] = []
        surplus = {row: _surplus(parties[row].values, costs) for row in looked_at}
        for a, b in table.promising(looked_at):
            rows = tuple(sorted(parties[a].rows + parties[b].rows))
            joint = table.joint(rows) if len(rows) <= size else None
            if joint is None:
                continue
            party = _together(menu, rows, *joint, company)
            gain = _surplus(party.values, costs) - surplus[a] - surplus[b]
            if gain > _LITTLE * surplus[a]:
                found.append((gain, a, b, party))
        for _, a, b, party in sorted(found, key=lambda pair: (-pair[0], pair[1], pair[2])):
            if parties[a].rows and parties[b].rows and len(parties[a].rows) + len(parties[b].rows) == len(party.rows):
                parties[a], parties[b] = party, Party((), party.values)
        looked_at = [row for row in looked_at if parties[row].rows]
    return [party for party in parties if party.rows]


def _alone(menu: Menu, values: Floats, stays: Floats, company: Sequence[set[int]]) -> list[Party]:
    """A party for every job; where it is alone already, staying counts for what it saves."""
    is_here = np.array([row in beside and len(beside) == 1 for row, beside in enumerate(company)], np.bool_)
    is_here &= menu.held != NONE
    here = np.flatnonzero(is_here)
    here = here[stays[here] >= values[here, menu.held[here]]]
    paid = values.copy()
    paid[here, menu.held[here]] = stays[here]
    columns = np.full(len(values), NONE)
    columns[here] = menu.held[here]
    return [Party((row,), own, column) for row, (own, column) in enumerate(zip(paid, columns.tolist(), strict=True))]


def _together(
    menu: Menu,
    rows: tuple[int, ...],
    values: Floats,
    batches: Mapping[int, Sequence[int]],
    company: Sequence[set[int]],
) -> Party:
    """A party of several; if it is together already, staying counts a little more."""
    if menu.held[rows[0]] == NONE or any(company[row] != set(rows) for row in rows):
        return Party(rows, values, batches=batches)
    column = int(menu.held[rows[0]])
    values = values.copy()
    values[column] *= 1.0 + _LITTLE
    return Party(rows, values, column, batches)


class _Table:
    """What is left of rates beside others, asked once for jobs that are alike."""

    def __init__(self, view: Snapshot, menu: Menu, worths: Floats, known: Known) -> None:
        self._view = view
        self._menu = menu
        self._worths = worths
        self._ratios = known.ratios
        self._likes = [_likes(job) for job in menu.jobs]
        self._columns: dict[int, list[tuple[Kind, int]]] = {}

    def promising(self, looked_at: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Pairs of rows of which each keeps so much of its rate that the two together are more than one."""
        alike: dict[Likes, list[int]] = {}
        for row in looked_at:
            alike.setdefault(self._likes[row], []).append(row)
        for (like, rows), (other, others) in combinations_with_replacement(alike.items(), 2):
            if like[3] != other[3] or (like == other and len(rows) == 1):
                continue
            pair = (rows[0], others[-1])
            for kind, column in self._offers(like[3]):
                batches = self._batches(pair, kind, column)
                if batches is not None and sum(self._ratios_of(pair, kind, column, batches)) > 1.0 + _LITTLE:
                    yield from combinations(rows, 2) if like == other else product(rows, others)
                    break

    def joint(self, rows: Sequence[int]) -> tuple[Floats, dict[int, Sequence[int]]] | None:
        """What jobs together would pay for each offer of their width, and their batches there; None: they fit nowhere.

        A batch that is tuned is the best alone, halved until memory fits.
        """
        menu = self._menu
        values = np.zeros(len(menu.offers))
        chosen: dict[int, Sequence[int]] = {}
        for kind, column in self._offers(menu.jobs[rows[0]].spec.narrowest):
            batches = self._batches(rows, kind, column)
            if batches is None:
                continue
            kept = self._ratios_of(rows, kind, column, batches)
            paid = [self._worths[row] * menu.rates[row, column] * part for row, part in zip(rows, kept, strict=True)]
            values[column] = sum(paid) if min(paid) > 0.0 else 0.0
            chosen[column] = batches
        return (values, chosen) if values.any() else None

    def _batches(self, rows: Sequence[int], kind: Kind, column: int) -> list[int] | None:
        """Batch sizes with which jobs fit on one device, 0 where a job has its own; None where nothing fits."""
        specs = [self._menu.jobs[row].spec for row in rows]
        batches = [int(self._menu.batches[row, column]) for row in rows]
        there = self._view.cluster.least_memory.get(kind, 0)
        while there:
            memory = [self._memory(spec, batch) for spec, batch in zip(specs, batches, strict=True)]
            if sum(memory) <= there:
                break
            able = [i for i, spec in enumerate(specs) if spec.batch_range and batches[i] > spec.batch_range[0]]
            if not able:
                return None
            most = max(able, key=lambda place: memory[place])
            low, _ = specs[most].batch_range or (0, 0)
            batches[most] = max(low, batches[most] // 2)
        return batches

    def _memory(self, spec: JobSpec, batch: int) -> float:
        estimates = self._view.estimates
        if batch and isinstance(estimates, KnowsBatches):
            return _MARGIN * estimates.memory(spec, batch)
        return spec.memory_bytes

    def _offers(self, width: int) -> list[tuple[Kind, int]]:
        found = self._columns.get(width)
        if found is None:
            found = self._columns[width] = [
                (offer.groups[0][0], column)
                for column, offer in enumerate(self._menu.offers)
                if len(offer.groups) == 1 and offer.width == width
            ]
        return found

    def _ratios_of(self, rows: Sequence[int], kind: Kind, column: int, batches: Sequence[int]) -> list[float]:
        """Rate of each beside the others over its rate alone with the best batch."""
        return [self._ratio(place, rows, kind, column, batches) for place in range(len(rows))]

    def _ratio(self, place: int, rows: Sequence[int], kind: Kind, column: int, batches: Sequence[int]) -> float:
        jobs, row, fraction = self._menu.jobs, rows[place], 1.0 / len(rows)
        others = [(other, batch) for other, batch in zip(rows, batches, strict=True) if other != row]
        alone = float(self._menu.rates[row, column])
        best = int(self._menu.batches[row, column])
        beside = tuple([(self._likes[other], batch) for other, batch in others])
        key = (self._likes[row], best, batches[place], kind, beside)
        ratio = self._ratios.get(key)
        if ratio is None:
            neighbours = tuple([Neighbour(jobs[other].spec, fraction, batch) for other, batch in others])
            groups = placed_on(self._view.cluster, kind, jobs[row].spec.narrowest).groups
            shared = Placement(groups, fraction, batches[place], neighbours)
            estimates, spec = self._view.estimates, jobs[row].spec
            believed = estimates.rate(spec, shared).mean * worth_of_step(estimates, spec, batches[place])
            ratio = self._ratios[key] = believed / alone if alone > 0.0 else 0.0
        return ratio


def _likes(job: Job) -> Likes:
    """Jobs that are alike in this slow each other down alike."""
    spec = job.spec
    return (spec.model, spec.batch_size, spec.devices, spec.narrowest)


def _surplus(values: Floats, costs: Floats) -> float:
    return max(0.0, float(np.max(values - costs)))


def _company(view: Snapshot, rows_of: dict[JobId, int], job: Job) -> set[int]:
    """Rows of the jobs on the devices of a job, its own included; empty where they share only some of them."""
    held = job.desired
    if held is None:
        return set()
    if not view.occupancy.is_shared and held.fractions == (1.0,):
        return {rows_of[job.id]}
    there = {tuple([r.job for r in view.occupancy.residents(device)]) for device in held.devices()}
    if len(there) > 1:
        return set()
    ids = set(next(iter(there)))
    if held.fractions != (1.0 / len(ids),) and not job.lane:
        return set()
    return {rows_of[other] for other in ids}
