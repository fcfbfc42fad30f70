"""Pollux: co-adapts devices and batch sizes of all jobs by goodput, with an exact knapsack and a seeded search.

The search minimizes the sum of all jobs' costs. A knapsack finds the best number of devices for every job; the numbers
are then packed onto nodes, as tightly as possible and with jobs staying where they are. If the packing cannot reach
these numbers, parts of the placement are removed and solved again (large-neighbourhood search): a few random jobs, or
all that touch a few random nodes. A part is replaced only by one that costs less.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import ceil, inf
from random import Random
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from carpool.core.draft import Draft
from carpool.core.errors import InputError
from carpool.core.model import Allocation, Job, JobId, Kind
from carpool.core.placement import lowest, merge_runs
from carpool.core.policy import Plan, Policy, Snapshot
from carpool.core.queue import in_submission_order
from carpool.core.topology import Node
from carpool.policies.estimator_queries import goodputs, kind_held, kinds_of, rate_on
from carpool.policies.registry import register

Floats = NDArray[np.float64]
Row = tuple[tuple[int, int], ...]  # (node, devices) pairs by ascending node: where a job sits

_STAYERS_FIRST = 0.8  # how often jobs that may stay are placed before jobs that move
_LESS = 1e-12  # least improvement, above rounding


@dataclass(frozen=True, slots=True)
class Stake:
    """One job's costs by number of devices, including 0."""

    local: Floats  # on one node, if it has to move there; infinite where that is not allowed
    spread: Floats  # over several nodes
    stay: float  # if it keeps the devices it has, perhaps none
    held: Row = ()

    @property
    def width(self) -> int:
        return sum([count for _, count in self.held])

    def cost(self, row: Row) -> float:
        if row == self.held:
            return self.stay
        return float((self.spread if len(row) > 1 else self.local)[sum([count for _, count in row])])


def search(sizes: Sequence[int], stakes: Sequence[Stake], random: Random, iterations: int) -> list[Row]:
    """A row (node, devices) for each job on nodes of the given sizes; empty for jobs that get nothing."""
    room = _Search(sizes, stakes, random)
    rows = [stake.held for stake in stakes]
    costs = [stake.stay for stake in stakes]
    all_jobs = range(len(stakes))
    for step in range(1 + (iterations if len(stakes) > 1 else 0)):
        torn = room.neighbourhood(rows) if step else all_jobs
        found = room.rebuild(rows, torn)
        found_costs = {job: stakes[job].cost(row) for job, row in found.items()}
        if sum(found_costs.values()) < sum([costs[job] for job in torn]) - _LESS:
            for job, row in found.items():
                rows[job], costs[job] = row, found_costs[job]
    return rows


class _Free:
    """Devices left on each node, and which nodes host a job that spans nodes: two of those would interfere."""

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
            if left[node] >= count:  # the rest goes to the node with the fewest devices left over
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
        """Jobs to place again: some random ones, or all on some nodes and those without devices."""
        random, num = self._random, len(rows)
        if random.random() < 0.5:
            return set(random.sample(range(num), min(num, random.randint(2, 6))))
        nodes = set(random.sample(range(len(self._sizes)), min(len(self._sizes), random.randint(2, 4))))
        torn = {job for job, row in enumerate(rows) if not row or any(node in nodes for node, _ in row)}
        return torn | {random.randrange(num)}

    def rebuild(self, rows: Sequence[Row], torn: Collection[int]) -> dict[int, Row]:
        """The best counts for the removed jobs in what others leave; jobs that keep their count stay if they can."""
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
        """The cheapest possible row with at most `wanted` devices."""
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


_NOTHING = 4e-3  # added to every speedup: a job without devices counts as a 250th of its fair share
_LEAST_WORTH = 0.01  # least value of a start, however new the job is


@register("pollux")
@dataclass(frozen=True, slots=True)
class Pollux(Policy):
    """Maximize the power mean of all jobs' speedups over a fair share: Pollux's objective, with our own search.

        speedup_j(A) = goodput_j(A) / goodput_j(fair share),   goodput at the best batch size for A

        maximize (1/J Σ speedup_j^power)^(1/power)

    The fair share is ⌈devices/jobs⌉ devices, taken as if on one node, as published. A move costs: the speedup is
    multiplied by (T − R·restart_s)/(T + restart_s), T being the job's age and R its moves so far, and by at most
    `trust`, since goodput after a move is estimated. A job gets at most `growth` times as many devices as it ever
    had, starting with its minimum; two jobs that span nodes do not share a node. Qiao et al., OSDI 2021.
    """

    power: float = -1.0
    restart_s: float = 30.0
    growth: int = 2
    trust: float = 0.9
    iterations: int = 80  # of the search over placements
    interval_s: float = 60.0  # plan after this long, whatever happens
    seed: int = 0

    def __post_init__(self) -> None:
        if self.power >= 0.0:
            raise InputError(f"power is {self.power}", way_out="Give a number below 0, such as -1.")
        if self.growth < 2:
            raise InputError(f"growth is {self.growth}", way_out="Give 2 or more, or jobs never get more devices.")
        if not 0.0 < self.trust <= 1.0:
            raise InputError(f"trust is {self.trust}", way_out="Give a number above 0, up to 1.")

    def plan(self, view: Snapshot) -> Plan:
        pasts = _pasts(view)
        draft, goals = Draft(view), list[_Goal]()
        for kind, jobs in _dealt(view).items():
            goals += self._goals(view, kind, jobs, pasts)
        _carry_out(draft, goals)
        moved = [goal for goal in goals if goal.row != goal.held]
        for goal in moved:
            pasts[goal.job.id] = pasts[goal.job.id].after(goal.row)
        num = sum([bool(goal.row) for goal in goals])
        reason = f"{num} of {len(goals)} jobs run, {len(moved)} of them moved, by goodput relative to a fair share"
        note = {job: list(past) for job, past in pasts.items() if past.placements}
        return draft.finish(reason, wake_at=view.at + self.interval_s if goals else None, note=note)

    def _goals(self, view: Snapshot, kind: Kind, jobs: Sequence[Job], pasts: dict[JobId, _Past]) -> list[_Goal]:
        sizes = _sizes(view, kind)
        options = [self._options(view, kind, job, pasts[job.id], sizes, len(jobs)) for job in jobs]
        stakes = [self._stake(view, job, pasts[job.id], choice) for job, choice in zip(jobs, options, strict=True)]
        rows = search(sizes, stakes, Random(f"{self.seed}/{kind}/{view.at}"), self.iterations)
        rows = in_submission_order(jobs, rows, lambda row: -_width(row))
        goals = []
        for job, stake, choice, row in zip(jobs, stakes, options, rows, strict=True):
            batches = choice.spread_batches if len(row) > 1 else choice.local_batches
            goals.append(_Goal(job, kind, stake.held, row, batches[_width(row)]))
        return goals

    def _options(
        self, view: Snapshot, kind: Kind, job: Job, past: _Past, sizes: Sequence[int], num_jobs: int
    ) -> _Options:
        spec, capacity, node = job.spec, sum(sizes), max(sizes)
        most = max(self.growth * past.widest, spec.narrowest)
        top = min(most, capacity, spec.widest)
        fair = ceil(capacity / num_jobs)
        near = min(top, node)
        counts = [fair, *range(1, near + 1), *range(2, top + 1)]
        found = goodputs(view, spec, kind, counts, [False] * (1 + near) + [True] * (top - 1))
        basis = found[0][0] or max([rate for rate, _ in found]) or 1.0
        none = (0.0, 0)
        local = [none, *found[1 : near + 1], *[none] * (top - near)]
        spread = [none, none, *found[near + 1 :]][: top + 1]
        return _Options(
            np.array([rate / basis for rate, _ in local]),
            np.array([rate / basis for rate, _ in spread]),
            [batch for _, batch in local],
            [batch for _, batch in spread],
        )

    def _stake(self, view: Snapshot, job: Job, past: _Past, options: _Options) -> Stake:
        """A job's costs: its terms of the power mean, to be minimized."""
        age = view.at - job.submitted_at
        moves = max(0, past.placements - 1)
        worth = max(age - moves * self.restart_s, 0.0) / (age + self.restart_s)
        worth = min(worth, self.trust) if job.desired is not None else max(worth, _LEAST_WORTH)
        held = _row(view, job)
        speedups = options.spread if len(held) > 1 else options.local
        kept = speedups[_width(held)] if _width(held) < len(speedups) else 0.0  # else it holds more than it may by now
        local, spread = self._terms(options.local * worth), self._terms(options.spread * worth)
        local[1 : job.spec.narrowest] = spread[1 : job.spec.narrowest] = inf
        return Stake(local, spread, float(self._terms(np.array(kept))), held)

    def _terms(self, speedups: Floats) -> Floats:
        return np.asarray((speedups + _NOTHING) ** self.power)


class _Past(NamedTuple):
    """What the policy remembers of a job between plans."""

    placements: int = 0  # how often it was assigned devices
    widest: int = 0  # most devices it ever had

    def after(self, row: Row) -> _Past:
        return _Past(self.placements + 1, max(self.widest, _width(row))) if row else self


class _Options(NamedTuple):
    """Speedups and their batch sizes by number of devices."""

    local: Floats
    spread: Floats
    local_batches: Sequence[int]
    spread_batches: Sequence[int]


class _Goal(NamedTuple):
    """A job's current and target row."""

    job: Job
    kind: Kind
    held: Row
    row: Row
    batch_size: int


def _pasts(view: Snapshot) -> dict[JobId, _Past]:
    """The last plan's note for current jobs; for others, what they hold from an earlier policy."""
    known = cast(dict[str, Any], view.note or {})
    fresh = {name: (1, job.desired.num_devices) for name, job in view.jobs.items() if job.desired is not None}
    return {job: _Past(*known.get(job, fresh.get(job, ()))) for job in view.jobs}


def _sizes(view: Snapshot, kind: Kind) -> list[int]:
    """Usable devices of a type on each node."""
    occupancy = view.occupancy
    return [
        0
        if node.id in occupancy.lost
        else sum([len(bank.devices) for bank in node.banks if bank.kind == kind])
        - sum(_is_of(view, device, node, kind) for device in occupancy.withheld_devices)
        for node in view.cluster.nodes
    ]


def _is_of(view: Snapshot, device: int, node: Node, kind: Kind) -> bool:
    return device in node.devices and view.cluster.kind_of(device) == kind


def _dealt(view: Snapshot) -> dict[Kind, list[Job]]:
    """Jobs by device type: the one they hold, else where rate and devices per job are highest."""
    capacity = {kind: sum(_sizes(view, kind)) for kind in view.cluster.kinds}
    dealt: dict[Kind, list[Job]] = {kind: [] for kind in view.cluster.kinds}
    for job in view.running():
        dealt[cast(Kind, kind_held(view, job))].append(job)
    for job in sorted([view.jobs[name] for name in view.waiting], key=lambda job: job.seq):
        fewest = job.spec.narrowest
        kinds = [kind for kind in kinds_of(view, job.spec, fewest) if capacity[kind] >= fewest]
        if len(kinds) > 1:
            worth = {
                kind: rate_on(view, job.spec, kind, fewest) * capacity[kind] / (len(dealt[kind]) + 1) for kind in kinds
            }
            kinds.sort(key=lambda kind: -worth[kind])
        if kinds:
            dealt[kinds[0]].append(job)
    return {kind: sorted(jobs, key=lambda job: job.seq) for kind, jobs in dealt.items() if jobs}


def _row(view: Snapshot, job: Job) -> Row:
    counts: dict[int, int] = {}
    for device in job.desired.devices() if job.desired is not None else ():
        node = view.cluster.node_of(device).id
        counts[node] = counts.get(node, 0) + 1
    return tuple(sorted(counts.items()))


def _width(row: Row) -> int:
    return sum([count for _, count in row])


def _carry_out(draft: Draft, goals: Sequence[_Goal]) -> None:
    """Move jobs, releasing all before assigning any, and set batch sizes."""
    for goal in goals:
        if goal.held and goal.row != goal.held:
            draft.release(goal.job)
    nodes = draft.view.cluster.nodes
    for goal in goals:
        if goal.row != goal.held and goal.row:
            runs = [run for node, count in goal.row for run in lowest(draft.occupancy, nodes[node], goal.kind, count)]
            draft.assign(goal.job, Allocation.exclusive(merge_runs(runs), goal.batch_size))
        elif goal.row and goal.job.desired is not None:
            draft.assign(goal.job, goal.job.desired._replace(batch_size=goal.batch_size))
