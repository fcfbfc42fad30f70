"""Co-location groups: jobs worth more together than apart on the same devices are allocated as one.

At prices μ a job alone has the surplus s_j = max over o of λ_j · g_j(o) − μ·c_o, or 0. Jobs on the same devices slow
each other down, but pay for the devices only once: s_P = max over o of Σ λ_j · g_j(o beside the others) − μ·c_o. Pairs
with the largest s_P − s_a − s_b above 0 are joined first. Where the estimator expects neighbours to cost their full
share, sharing gains nothing and no groups are formed.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import combinations, combinations_with_replacement, product
from typing import NamedTuple

import numpy as np

from carpool.core.model import Job, Kind
from carpool.core.policy import Snapshot
from carpool.core.queue import twin_key
from carpool.core.topology import Neighbour, Placement
from carpool.policies.estimator_queries import placed_on, worth_of_step
from carpool.policies.market.group_trials import GroupTrials
from carpool.policies.market.knapsack import NONE, Choices, Floats
from carpool.policies.market.lane_groups import Bids, Block, LaneGroups, considered, fitting_batches, sharers_of
from carpool.policies.market.menu import Menu
from carpool.policies.market.policy_memory import EstimateCache

_LEAST = 0.01  # part of a group's value that remains, however expensive its changes
_LITTLE = 1e-6  # least relative gain, above rounding
# bonus of a group that runs already; larger until it is measured, so that it runs long enough for that
_STAYS, _UNMEASURED = 1.1, 1.5
# upper limit on an untried group of waiting jobs, relative to the best of them: less than the bonus for staying
_HOPED = 1.05
_MOST = 96  # groups considered, the highest bidders per device first: the work grows with the square

Likes = tuple[str, int, int, int]


class ColocationGroup(NamedTuple):
    """Jobs (rows of the menu) that share devices, and the value of each offer to them."""

    rows: tuple[int, ...]
    values: Floats
    stays_at: int = NONE  # the offer that it has already and would stay with
    batches: Mapping[int, Sequence[int]] = {}  # by offer, of each row; those alone are the menu's
    shares: Mapping[int, Sequence[float]] = {}  # by offer, of each row; elsewhere equal ones that sum to 1

    def fractions(self, option: int) -> Sequence[float]:
        return self.shares.get(option) or [1.0 / len(self.rows)] * len(self.rows)


class ColocationGroups:
    """All groups. Nearly all are single jobs, so they are stored as columns."""

    def __init__(self, values: Floats, stays_at: Choices) -> None:
        self.values = values  # [group, offer]
        self.stays_at = stays_at  # [group]
        self._rows: list[tuple[int, ...]] = [(row,) for row in range(len(values))]
        self._batches: dict[int, Mapping[int, Sequence[int]]] = {}
        self._shares: dict[int, Mapping[int, Sequence[float]]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, place: int) -> ColocationGroup:
        batches, shares = self._batches.get(place, {}), self._shares.get(place, {})
        return ColocationGroup(self._rows[place], self.values[place], int(self.stays_at[place]), batches, shares)

    def rows(self, place: int) -> tuple[int, ...]:
        return self._rows[place]

    def put(self, place: int, other: int, group: ColocationGroup) -> None:
        """Replace one group by a larger one, and empty the other that joined it."""
        self._rows[other] = ()
        self._rows[place] = group.rows
        self.values[place], self.stays_at[place] = group.values, group.stays_at
        self._batches[place], self._shares[place] = group.batches, group.shares

    def start_in_order(self, jobs: Sequence[Job], choice: Choices) -> None:
        """Exchange waiting twins between groups, so that those submitted first are in the groups that start now."""
        if len(self) == len(jobs):
            return
        twins: dict[Hashable, list[tuple[bool, int, int, int]]] = {}
        for place, rows in enumerate(self._rows):
            for index, row in enumerate(rows):
                if jobs[row].desired is None:
                    slot = (bool(choice[place] == NONE), row, place, index)
                    twins.setdefault(twin_key(jobs[row]), []).append(slot)
        for slots in twins.values():
            first_come = sorted([row for _, row, _, _ in slots], key=lambda row: jobs[row].seq)
            for row, (_, _, place, index) in zip(first_come, sorted(slots), strict=True):
                rows = self._rows[place]
                self._rows[place] = (*rows[:index], row, *rows[index + 1 :])

    def without_empty(self) -> ColocationGroups:
        filled = [place for place, rows in enumerate(self._rows) if rows]
        if len(filled) == len(self._rows):
            return self
        found = ColocationGroups(self.values[filled], self.stays_at[filled])
        found._rows = [self._rows[place] for place in filled]
        found._batches = {new: self._batches[old] for new, old in enumerate(filled) if old in self._batches}
        found._shares = {new: self._shares[old] for new, old in enumerate(filled) if old in self._shares}
        return found


def form_groups(
    view: Snapshot,
    menu: Menu,
    worths: Floats,
    values: Floats,
    stays: Floats,
    prices: Floats,
    *,
    most: int,
    known: EstimateCache,
) -> ColocationGroups:
    """Form groups of up to `most` jobs. `values` are those of moving alone, `stays` those of staying."""
    sharers = _sharers(view, menu)
    groups = _alone(menu, values, stays, sharers)
    if most < 2 or view.estimates.tunes_batches:
        return groups
    costs = menu.needs @ prices
    bids = (values / menu.needs.sum(axis=1)).max(axis=1)
    able = [row for row in np.argsort(-bids, kind="stable").tolist() if not menu.jobs[row].spec.exact]
    considered = [row for row in able[:_MOST] if bids[row] > 0.0]
    table = _Table(view, menu, worths, known)
    for size in range(2, most + 1):
        found: list[tuple[float, int, int, ColocationGroup]] = []
        surplus: dict[int, float] = {}
        for a, b in table.promising(considered):
            surplus = surplus or {row: _surplus(groups.values[row], costs) for row in considered}
            rows = tuple(sorted(groups.rows(a) + groups.rows(b)))
            joint = table.joint(rows) if len(rows) <= size else None
            if joint is None:
                continue
            group = _together(menu, rows, *joint, sharers)
            gain = _surplus(group.values, costs) - surplus[a] - surplus[b]
            if gain > _LITTLE * surplus[a]:
                found.append((gain, a, b, group))
        for _, a, b, group in sorted(found, key=lambda pair: (-pair[0], pair[1], pair[2])):
            here, there = groups.rows(a), groups.rows(b)
            if here and there and len(here) + len(there) == len(group.rows):
                groups.put(a, b, group)
        considered = [row for row in considered if groups.rows(row)]
    return groups.without_empty()


def _alone(menu: Menu, values: Floats, stays: Floats, sharers: Mapping[int, set[int]]) -> ColocationGroups:
    """One group per job; one that holds its devices alone is valued at staying where it is."""
    here = np.array([row for row, beside in sharers.items() if len(beside) == 1], np.intp)
    here = here[stays[here] >= values[here, menu.held[here]]]
    paid, columns = values.copy(), np.full(len(values), NONE)
    paid[here, menu.held[here]] = stays[here]
    columns[here] = menu.held[here]
    return ColocationGroups(paid, columns)


def _together(
    menu: Menu,
    rows: tuple[int, ...],
    values: Floats,
    batches: Mapping[int, Sequence[int]],
    sharers: Mapping[int, set[int]],
) -> ColocationGroup:
    """A group of several jobs, with a small bonus if they share devices already."""
    if menu.held[rows[0]] == NONE or any(sharers.get(row) != set(rows) for row in rows):
        return ColocationGroup(rows, values, batches=batches)
    column = int(menu.held[rows[0]])
    values = values.copy()
    values[column] *= 1.0 + _LITTLE
    return ColocationGroup(rows, values, column, batches)


def lane_blocks(view: Snapshot, menu: Menu, bids: Bids, trials: GroupTrials, *, most: int) -> list[tuple[int, Block]]:
    """Blocks of jobs that share a device at chosen shares, with their offers (`lane_groups`)."""
    sharers = sharers_of(view, menu)
    rows = considered(menu, bids, sharers)
    found: list[tuple[int, Block]] = []
    for kind, column in [(o.groups[0][0], c) for c, o in enumerate(menu.offers) if o.width == 1]:
        taken = {row for _, block in found for row in block.rows}
        able = [row for row in rows if menu.rates[row, column] > 0.0 and row not in taken]
        blocks = LaneGroups(view, menu, bids, kind, column, most, sharers, trials).merged(able)
        found += [(column, block) for block in blocks]
    return found


def group_lanes(
    view: Snapshot, menu: Menu, bids: Bids, blocks: Sequence[tuple[int, Block]], worths: Sequence[float]
) -> ColocationGroups:
    """Groups with shares: `worths` are the values of blocks per second."""
    sharers = sharers_of(view, menu)
    groups = _alone(menu, bids.values, _capped_stays(view, menu, bids.stays, sharers), sharers)
    for (column, block), worth in zip(blocks, worths, strict=True):
        group = _lane_group(menu, bids, column, block, worth)
        first, *others = block.rows
        for other in others:
            groups.put(first, other, group)
    return groups.without_empty()


def _lane_group(menu: Menu, bids: Bids, column: int, block: Block, worth: float) -> ColocationGroup:
    """A block as a group; its value is reduced by the cost of the changes to its running jobs."""
    values = np.zeros(len(menu.offers))
    values[column] = worth * max(_LEAST, 1.0 - block.late_s / block.end_s)
    if not block.is_measured and all(menu.held[row] == NONE for row in block.rows):
        waiting = bids.values[menu.held == NONE, column]
        # an untried group must not displace a running job
        values[column] = min(values[column], _HOPED * float(waiting.max()))
    if block.is_held:
        values[column] *= _STAYS if block.is_measured else _UNMEASURED
    stays_at = column if block.is_held else NONE
    return ColocationGroup(block.rows, values, stays_at, {column: block.batches}, {column: block.shares})


def _capped_stays(view: Snapshot, menu: Menu, stays: Floats, sharers: Mapping[int, set[int]]) -> Floats:
    """[job]: the value of staying, where jobs without neighbours may still have a part of their device."""
    found = stays.copy()
    for row, beside in sharers.items():
        job = menu.jobs[row]
        if len(beside) == 1 and job.desired is not None and job.desired.fractions != (1.0,):
            (kind, _), *_ = menu.offers[menu.held[row]].groups
            entry = (job.spec, job.desired.shares[0].fraction, job.desired.batch_size)
            found[row] *= view.estimates.retention(kind, [[entry]])[0][0].mean
    return found


class _Table:
    """Rates beside other jobs, relative to alone, queried once for jobs of equal traits."""

    def __init__(self, view: Snapshot, menu: Menu, worths: Floats, known: EstimateCache) -> None:
        self._view = view
        self._menu = menu
        self._worths = worths
        self._ratios = known.ratios
        self._likes: dict[int, Likes] = {}  # by row
        self._columns: dict[int, list[tuple[Kind, int]]] = {}

    def promising(self, considered: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Pairs of rows whose relative rates together exceed one."""
        alike: dict[Likes, list[int]] = {}
        for row in considered:
            alike.setdefault(self._like(row), []).append(row)
        for (like, rows), (other, others) in combinations_with_replacement(alike.items(), 2):
            if like[3] != other[3] or (like == other and len(rows) == 1):
                continue
            pair = (rows[0], others[-1])
            for kind, column in self._offers(like[3]):
                batches = fitting_batches(self._view, self._menu, pair, kind, column)
                if batches is not None and sum(self._ratios_of(pair, kind, column, batches)) > 1.0 + _LITTLE:
                    yield from combinations(rows, 2) if like == other else product(rows, others)
                    break

    def joint(self, rows: Sequence[int]) -> tuple[Floats, dict[int, Sequence[int]]] | None:
        """Value of each offer of their size to jobs together, and their batch sizes there; None: they fit nowhere.

        A tuned batch size is the best alone, halved until memory fits.
        """
        menu = self._menu
        values = np.zeros(len(menu.offers))
        chosen: dict[int, Sequence[int]] = {}
        for kind, column in self._offers(menu.jobs[rows[0]].spec.narrowest):
            batches = fitting_batches(self._view, self._menu, rows, kind, column)
            if batches is None:
                continue
            kept = self._ratios_of(rows, kind, column, batches)
            paid = [self._worths[row] * menu.rates[row, column] * part for row, part in zip(rows, kept, strict=True)]
            values[column] = sum(paid) if min(paid) > 0.0 else 0.0
            chosen[column] = batches
        return (values, chosen) if values.any() else None

    def _like(self, row: int) -> Likes:
        found = self._likes.get(row)
        if found is None:
            found = self._likes[row] = _likes(self._menu.jobs[row])
        return found

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
        """Each job's rate beside the others over its best rate alone."""
        return [self._ratio(place, rows, kind, column, batches) for place in range(len(rows))]

    def _ratio(self, place: int, rows: Sequence[int], kind: Kind, column: int, batches: Sequence[int]) -> float:
        jobs, row, fraction = self._menu.jobs, rows[place], 1.0 / len(rows)
        others = [(other, batch) for other, batch in zip(rows, batches, strict=True) if other != row]
        alone = float(self._menu.rates[row, column])
        best = int(self._menu.batches[row, column])
        beside = tuple([(self._like(other), batch) for other, batch in others])
        key = (self._like(row), best, batches[place], kind, beside)
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
    """Traits by which jobs slow each other down."""
    spec = job.spec
    return (spec.model, spec.batch_size, spec.devices, spec.narrowest)


def _surplus(values: Floats, costs: Floats) -> float:
    return max(0.0, float(np.max(values - costs)))


def _sharers(view: Snapshot, menu: Menu) -> dict[int, set[int]]:
    """For each running job's row: the rows of all jobs on its devices, including itself.

    Jobs that share only some of their devices are left out.
    """
    occupancy = view.occupancy
    holds = np.flatnonzero(menu.held != NONE).tolist()
    is_shared = occupancy.is_shared
    rows_of = {job.spec.id: row for row, job in enumerate(menu.jobs)} if is_shared else {}
    found: dict[int, set[int]] = {}
    for row in holds:
        job = menu.jobs[row]
        held = job.desired
        assert held is not None
        shares = held.shares
        if not is_shared and ((len(shares) == 1 and shares[0].fraction == 1.0) or held.is_whole):
            found[row] = {row}
            continue
        there = {tuple([r.job for r in occupancy.residents(device)]) for device in held.devices()}
        if len(there) > 1:
            continue
        ids = next(iter(there))
        if held.fractions == (1.0 / len(ids),) or job.lane:
            found[row] = {row if other == job.spec.id else rows_of[other] for other in ids}
    return found
