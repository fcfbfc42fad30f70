"""Lane groups: jobs that share a device at chosen shares, where that saves weighted completion time.

Used where the estimator predicts what jobs keep at any shares (`Estimator.retention`). Blocks of jobs, at first single
ones, are merged while that saves most: both blocks one after the other, against all their jobs together at their best
shares, with the jobs that wait behind them. While a prediction is uncertain, half a standard deviation is added to it,
less for short jobs, so that a group that could pay is tried; once it is measured, the measurement counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import NamedTuple

import numpy as np

from carpool.core.estimates import Estimate, MixEntry
from carpool.core.model import JobId, Kind
from carpool.core.policy import Snapshot
from carpool.policies.estimator_queries import memory_of
from carpool.policies.market.group_trials import SETTLED, GroupTrials
from carpool.policies.market.knapsack import NONE, Floats
from carpool.policies.market.menu import Menu

LEVELS = (0.1, 0.15, 0.2, 0.25, 0.33, 0.4, 0.5, 0.6, 0.8, 1.0)  # shares: spare workers are kept per share
MOST = 8  # jobs on one device
_SUMS = (1.0, 1.2, 1.5, 2.0)  # of equal shares: moderately past the whole device is usually best
_CONSIDERED = 16  # blocks beside those that share devices already
_OPTIMISM = 0.5  # standard deviations added to a prediction
_TRIAL_S = 3.0  # what a trial of a group may cost
_SAVES = 1.03  # least factor by which merging shortens completion times
_RESHARES = 1.1  # least factor by which other shares shorten completion times of a group that was measured
_LEAST = 1e-9

Shares = tuple[float, ...]


class Bids(NamedTuple):
    """What forming groups depends on, by job."""

    worths: Floats  # λ
    values: Floats  # [job, offer]: of moving there alone
    stays: Floats  # of staying alone
    seconds: Floats  # [job, offer]: alone until its end
    weights: Floats
    move_s: Floats


class Block(NamedTuple):
    """Jobs (rows of the menu) on one device: their shares, speeds relative to alone, and completion times."""

    rows: tuple[int, ...]
    shares: Shares
    speeds: tuple[float, ...]
    cost: float  # Σ weight · completion time
    end_s: float
    is_held: bool = False  # they run so already
    is_measured: bool = False  # the speeds are not only predicted


def completion(weights: Sequence[float], seconds: Sequence[float], speeds: Sequence[float]) -> tuple[float, float]:
    """Σ weight · completion time, and the last completion, of jobs that start together at these relative speeds.

    When one ends, the slowdown of the others shrinks in proportion to the number of neighbours left.
    """
    left, at, cost = dict(enumerate(seconds)), 0.0, 0.0
    others = max(1, len(seconds) - 1)
    while left:
        share = (len(left) - 1) / others
        rates = {place: 1.0 / (1.0 + (1.0 / max(speeds[place], _LEAST) - 1.0) * share) for place in left}
        step = min(left[place] / rates[place] for place in left)
        at += step
        over = [place for place in left if left[place] - step * rates[place] <= 1e-9 * at]
        left = {place: left[place] - step * rates[place] for place in left if place not in over}
        cost += at * sum(weights[place] for place in over)
    return cost, at


@dataclass(slots=True)
class LaneGroups:
    """Finds the blocks of one device type."""

    view: Snapshot
    menu: Menu
    bids: Bids
    kind: Kind
    column: int
    most: int
    sharers: Mapping[int, set[int]]
    trials: GroupTrials
    _known: dict[tuple[int, ...], Block | None] = field(default_factory=dict)

    def merged(self, rows: Sequence[int]) -> list[Block]:
        """Blocks of these rows, merged while that saves completion time; groups that run already come first."""
        held = self._held_blocks(rows)
        together = {row for block in held for row in block.rows}
        blocks = [*held, *[self._single(row) for row in rows if row not in together]]
        while len(blocks) > 1:
            best = self._best_merge(blocks)
            if best is None:
                break
            first, second, joint = best
            blocks = [block for block in blocks if block not in (first, second)] + [joint]
        return [block for block in blocks if len(block.rows) > 1]

    def _held_blocks(self, rows: Sequence[int]) -> list[Block]:
        """Groups that run already, unless taking turns is better by what was measured."""
        groups = {tuple(sorted(self.sharers.get(row, ()))) for row in rows}
        found = [group for group in sorted(groups) if len(group) > 1 and set(group) <= set(rows)]
        self._evaluate(found)
        blocks = []
        for group in found:
            best, now = self._known[group], self._now(group)
            if now is not None and self._is_slower_than_turns(now):
                self.trials.refuse(self._ids(group))
                self._known[group] = None
            elif now is not None:
                is_worth = best is not None and now.is_measured and best.cost * _RESHARES < now.cost
                blocks.append(best if best is not None and is_worth else now)
        return blocks

    def _now(self, rows: tuple[int, ...]) -> Block | None:
        """A running group at the shares that it has."""
        shares = tuple([self._held(row) for row in rows])
        if not self._runs_so(rows, shares):
            return None
        (kept,) = self.view.estimates.retention(self.kind, [self._mix(rows, shares)])
        return self._block(rows, shares, kept)

    def _is_slower_than_turns(self, block: Block) -> bool:
        """Whether its jobs would end sooner one after another; never while that is only predicted."""
        if not block.is_measured:
            return False
        behind, at, cost = self._behind(block.rows), 0.0, 0.0
        alone = [(float(self.bids.seconds[row, self.column]), float(self.bids.weights[row])) for row in block.rows]
        for seconds, weight in sorted(alone, key=lambda each: each[0] / each[1]):
            at += seconds
            cost += weight * at
        return (cost + behind * at) * _SAVES < block.cost + behind * block.end_s

    def _best_merge(self, blocks: Sequence[Block]) -> tuple[Block, Block, Block] | None:
        able = [block for block in blocks if not self._is_on_trial(block)]
        pairs = [pair for pair in combinations(able, 2) if len(pair[0].rows) + len(pair[1].rows) <= self.most]
        self._evaluate([_union(*pair) for pair in pairs])
        found: list[tuple[float, tuple[int, ...], Block, Block, Block]] = []
        for first, second in pairs:
            joint = self._known[_union(first, second)]
            if joint is not None:
                saved = self._saved(first, second, joint)
                if saved > 0.0:
                    found.append((-saved, joint.rows, first, second, joint))
        return min(found)[2:] if found else None

    def _is_on_trial(self, block: Block) -> bool:
        """Whether the group runs and is about to be measured: until then no job joins it."""
        is_new = block.is_held and not block.is_measured
        return is_new and self.trials.is_young(self._mix(block.rows, block.shares), self.view.at)

    def _saved(self, first: Block, second: Block, joint: Block) -> float:
        """Weighted seconds saved by merging; 0 where it does not pay."""
        behind = self._behind(joint.rows)
        weights = [sum(float(self.bids.weights[row]) for row in block.rows) for block in (first, second)]
        waits = min(weights[1] * first.end_s, weights[0] * second.end_s)
        apart = first.cost + second.cost + waits + behind * (first.end_s + second.end_s)
        together = joint.cost + behind * joint.end_s
        return apart - together if together * (1.0 if joint.is_held else _SAVES) < apart else 0.0

    def _behind(self, rows: Sequence[int]) -> float:
        """Weight of the jobs that wait for a device like this one, beside these."""
        others = float(self.bids.weights.sum() - self.bids.weights[list(rows)].sum())
        return max(0.0, others / max(1.0, float(self.menu.supply.sum())))

    def _single(self, row: int) -> Block:
        seconds, weight = float(self.bids.seconds[row, self.column]), float(self.bids.weights[row])
        return Block((row,), (1.0,), (1.0,), weight * seconds, seconds)

    def _evaluate(self, groups: Iterable[tuple[int, ...]]) -> None:
        """Evaluate groups at their candidate shares, all in one query."""
        missing = [rows for rows in dict.fromkeys(groups) if rows not in self._known]
        vectors = {rows: self._vectors(rows) if self._fits(rows) else [] for rows in missing}
        asked = [self._mix(rows, vector) for rows in missing for vector in vectors[rows]]
        answers = iter(self.view.estimates.retention(self.kind, asked) if asked else ())
        for rows in missing:
            blocks = [self._block(rows, vector, next(answers)) for vector in vectors[rows]]
            behind = self._behind(rows)
            self._known[rows] = min(blocks, key=lambda block: block.cost + behind * block.end_s, default=None)

    def _vectors(self, rows: tuple[int, ...]) -> list[Shares]:
        """Candidate shares: as they are, with equal shares for newcomers; equal for all. Exact jobs keep theirs."""
        held = [self._held(row) for row in rows]
        found: dict[Shares, None] = {}
        levels = [1.0 / len(rows)] if not self._has_caps else [_level(total / len(rows)) for total in _SUMS] + [1.0]
        for keeps in (True, False):
            for level in levels:
                shares = [share if share and keeps else level for share in held]
                fixed = [self.menu.jobs[row].lane for row in rows]
                found[tuple([lane[0] if lane else share for lane, share in zip(fixed, shares, strict=True)])] = None
        return list(found)

    @property
    def _has_caps(self) -> bool:
        """Whether shares matter: not on CPUs."""
        return not self.kind.startswith("cpu")

    def _held(self, row: int) -> float:
        held = self.menu.jobs[row].desired
        return held.shares[0].fraction if held is not None and self.menu.held[row] == self.column else 0.0

    def _mix(self, rows: Sequence[int], shares: Shares) -> list[MixEntry]:
        batches = [0 if (held := self.menu.jobs[row].desired) is None else held.batch_size for row in rows]
        specs = [self.menu.jobs[row].spec for row in rows]
        return list(zip(specs, shares, batches, strict=True))

    def _block(self, rows: tuple[int, ...], shares: Shares, kept: Sequence[Estimate]) -> Block:
        weights = [float(self.bids.weights[row]) for row in rows]
        seconds = [float(self.bids.seconds[row, self.column]) for row in rows]
        rest = max(seconds)
        runs = self.sharers.get(rows[0]) == set(rows)  # other shares for it are not worth a trial
        hope = 0.0 if runs else _OPTIMISM * max(0.0, 1.0 - _TRIAL_S / max(rest, _LEAST))
        speeds = tuple([min(1.0, each.mean + hope * each.std) for each in kept])
        is_held = self._runs_so(rows, shares)
        late = [0.0 if is_held else self._change_s(row, share) for row, share in zip(rows, shares, strict=True)]
        cost, end_s = completion(
            weights, [s + x * each for s, each, x in zip(seconds, late, speeds, strict=True)], speeds
        )
        is_measured = all(each.std <= SETTLED * each.mean for each in kept)
        return Block(rows, shares, speeds, cost, end_s, is_held, is_measured)

    def _change_s(self, row: int, share: float) -> float:
        """Seconds that a running job stands still for another share."""
        held = self._held(row)
        return float(self.bids.move_s[row]) if held and held != share else 0.0

    def _runs_so(self, rows: Sequence[int], shares: Shares) -> bool:
        jobs = [self.menu.jobs[row] for row in rows]
        held = [job.desired for job in jobs]
        first = held[0]
        if first is None or any(each is None or not each.same_devices(first) for each in held):
            return False
        there = {resident.job for device in first.devices() for resident in self.view.occupancy.residents(device)}
        return there == {job.id for job in jobs} and all(
            each is not None and each.fractions == (share,) for each, share in zip(held, shares, strict=True)
        )

    def _ids(self, rows: Sequence[int]) -> list[JobId]:
        return [self.menu.jobs[row].id for row in rows]

    def _fits(self, rows: Sequence[int]) -> bool:
        """Whether memory suffices, and no part of the group was measured to be slower than taking turns."""
        if self.trials.is_refused(self._ids(rows)):
            return False
        there = self.view.cluster.least_memory.get(self.kind, 0)
        needed = [memory_of(self.view.estimates, self.menu.jobs[row].spec) for row in rows]
        return not there or sum(needed) <= there


def considered(menu: Menu, bids: Bids, sharers: Mapping[int, set[int]]) -> list[int]:
    """Rows that may share: jobs on one device, those that share already, and the highest bidders."""
    able = [row for row, job in enumerate(menu.jobs) if job.spec.narrowest == 1 and bids.values[row].any()]
    bid = {row: float(bids.values[row].max()) for row in able}
    runs = [row for row in able if len(sharers.get(row, ())) > 1]
    first = sorted(able, key=lambda row: (-bid[row], row))[:_CONSIDERED]
    return sorted({*runs, *first})


def sharers_of(view: Snapshot, menu: Menu) -> dict[int, set[int]]:
    """For each running job's row: the rows of all jobs on its devices, including itself."""
    rows: dict[JobId, int] = {job.id: row for row, job in enumerate(menu.jobs)}
    found: dict[int, set[int]] = {}
    for row in np.flatnonzero(menu.held != NONE).tolist():
        held = menu.jobs[row].desired
        assert held is not None
        there = {resident.job for device in held.devices() for resident in view.occupancy.residents(device)}
        if there <= rows.keys():
            found[row] = {rows[job] for job in there}
    return found


def _union(first: Block, second: Block) -> tuple[int, ...]:
    return tuple(sorted(first.rows + second.rows))


def _level(share: float) -> float:
    return min(LEVELS, key=lambda level: abs(level - min(1.0, share)))
