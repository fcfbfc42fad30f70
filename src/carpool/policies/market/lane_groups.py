"""Lane groups: jobs that share a device at chosen shares, where that saves weighted completion time.

Used where the estimator predicts what fraction of its speed a job keeps at a share (`Estimator.retention`). At first
each job is a block of its own. The two blocks whose merger saves most weighted completion time are merged, until no
merger saves enough. This assumes that blocks run in order of duration divided by weight, smallest first (`Schedule`).
While a prediction is uncertain, a quarter of its standard deviation is added, less for short jobs, so that a promising
group is tried; once it is measured, the measurement counts.

A block of nothing but jobs of unknown length is open-ended (`completion`): a job that has been running is expected to
need as much more time as one that has not started. So jobs are added to such a block as long as all of them together
become faster; letting one of them wait for another would save nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from carpool.core.estimates import Estimate, Estimator, MixEntry
from carpool.core.model import JobId, JobSpec, Kind
from carpool.core.policy import Snapshot
from carpool.policies.estimator_queries import memory_of
from carpool.policies.market.group_trials import SETTLED, GroupTrials
from carpool.policies.market.knapsack import NONE, Floats
from carpool.policies.market.menu import Menu

LEVELS = (0.1, 0.15, 0.2, 0.25, 0.33, 0.4, 0.5, 0.6, 0.8, 1.0)  # shares: spare workers are kept per share
MOST = 8  # jobs on one device
_SUMS = (1.0, 1.2, 1.5, 2.0, 3.0)  # of a group's shares, tried with equal ones
_CONSIDERED = 16  # blocks beside those that share devices already
_OPTIMISM = 0.25  # standard deviations added to a prediction
_TRIAL_S = 3.0  # most that a trial of a group may cost
_SAVES = 1.03  # least factor by which merging shortens completion times
_CHANGES = 1.1  # least factor by which a change of a running group shortens completion times
_LISTED = 128  # jobs that have an entry of their own in the schedule
_MERGED_JOBS = 32  # entries into which all jobs behind those are merged
_MARGIN = 1.1  # on the predicted memory of a tuned batch
_NEVER_S = 1e12  # time of an option that a job cannot have
_LEAST = 1e-9

Shares = tuple[float, ...]


class Bids(NamedTuple):
    """What forming groups depends on, by job."""

    values: Floats  # [job, offer]: of moving there alone
    stays: Floats  # of staying alone
    seconds: Floats  # [job, offer]: alone until its end
    weights: Floats
    move_s: Floats
    start_s: Floats  # of a job that holds no device: until it computes
    is_unknown: NDArray[np.bool_]  # its length is only a guess


class Block(NamedTuple):
    """Jobs (rows of the menu) on one device: their shares, speeds relative to alone, and completion times."""

    rows: tuple[int, ...]
    shares: Shares
    speeds: tuple[float, ...]
    cost: float  # Σ weight · completion time
    end_s: float
    is_held: bool = False  # its jobs already run like this
    is_measured: bool = False  # the speeds are not only predicted
    late_s: float = 0.0  # stall of its running jobs until they run like this
    batches: tuple[int, ...] = (0,)  # 0: the job's own


class LanePace(NamedTuple):
    """Speeds of a job relative to alone on the whole device."""

    together: float  # in its group, at its share
    apart: float = 1.0  # at its share, without neighbours
    move_s: float = 0.0  # time to change to the whole device

    def slowdown(self, neighbours: float) -> float:
        """Seconds per second alone, with a part of the group's other members left."""
        apart = 1.0 / max(self.apart, _LEAST)
        return apart + max(0.0, 1.0 / max(self.together, _LEAST) - apart) * neighbours


def completion(
    weights: Sequence[float], seconds: Sequence[float], paces: Sequence[LanePace], *, is_open_ended: bool = False
) -> tuple[float, float]:
    """Σ weight · completion time, and the last completion, of jobs that start together.

    When one ends, the slowdown of the others by each other shrinks in proportion to the number of neighbours left; the
    last one gets the whole device if that pays. Open-ended jobs have exponentially distributed lengths with these
    means: on average the first ends after 1 / Σ (rate / mean). We take it to be the one with the shortest time; the
    others' expected remaining time stays the same.
    """
    left, at, cost = dict(enumerate(seconds)), 0.0, 0.0
    others = max(1, len(seconds) - 1)
    while left:
        times = {place: left[place] * paces[place].slowdown((len(left) - 1) / others) for place in left}
        if len(left) == 1:
            times = {place: min(times[place], paces[place].move_s + left[place]) for place in left}
        step = min(times.values())
        over = [place for place in left if times[place] <= step + 1e-9 * at]
        if is_open_ended:
            step, over = 1.0 / sum(1.0 / max(time, _LEAST) for time in times.values()), over[:1]
        at += step
        done = 0.0 if is_open_ended else step
        left = {place: left[place] * (1.0 - done / max(times[place], _LEAST)) for place in left if place not in over}
        cost += at * sum(weights[place] for place in over)
    return cost, at


class Schedule:
    """Σ weight · completion time of all jobs, by the blocks that they form.

    Blocks are assumed to run in order of duration divided by weight, smallest first. On m devices, the i-th waits for
    the durations of the blocks i − m, i − 2m and so on, so the first m wait for nothing. A block behind merged entries
    waits for (p − m + 1) / (p · m) of the total duration before it, where p is the number of devices used by everything
    before it.
    """

    def __init__(self, ends: Floats, weights: Floats, widths: Floats, devices: float) -> None:
        """Start from the jobs outside any block, given their device-seconds, weights and device counts."""
        counts = np.maximum(1, widths).astype(int)
        ends, weights = np.repeat(ends / counts, counts), np.repeat(weights / counts, counts)  # one entry per device
        order = np.argsort(ends / np.maximum(weights, _LEAST), kind="stable")
        merged = np.array_split(order[_LISTED:], min(len(order[_LISTED:]), _MERGED_JOBS) or 1)
        parts = [*order[:_LISTED, None], *[part for part in merged if len(part)]]
        self._ends = np.array([ends[part].sum() for part in parts])
        self._weights = np.array([weights[part].sum() for part in parts])
        self._counts = np.array([float(len(part)) for part in parts])
        self._devices = max(1, int(devices))

    def is_short(self, blocks: int) -> bool:
        """Whether some block has to wait for a device; otherwise no merger saves anything."""
        return bool(blocks + self._counts.sum() > self._devices)

    def costs(self, candidates: Sequence[Sequence[Block]], weights: Floats) -> Floats:
        """[candidate]: the sum of a set of blocks with the other jobs; `weights` are those of all rows."""
        longest = max(len(blocks) for blocks in candidates)
        shape = (len(candidates), longest + len(self._ends))
        ends, heavy, counts, inner = np.zeros(shape), np.zeros(shape), np.zeros(shape), np.zeros(len(candidates))
        ends[:, longest:], heavy[:, longest:], counts[:, longest:] = self._ends, self._weights, self._counts
        for place, blocks in enumerate(candidates):
            ends[place, : len(blocks)] = [block.end_s for block in blocks]
            heavy[place, : len(blocks)] = [float(weights[list(block.rows)].sum()) for block in blocks]
            counts[place, : len(blocks)] = 1.0
            inner[place] = sum(block.cost for block in blocks)
        keys = np.where(counts > 0.0, ends / np.maximum(heavy, _LEAST), np.inf)
        order = np.argsort(keys, axis=1, kind="stable")
        ends, heavy, counts = (np.take_along_axis(each, order, axis=1) for each in (ends, heavy, counts))
        return np.asarray(inner + (heavy * self._starts(ends, counts)).sum(axis=1))

    def _starts(self, ends: Floats, counts: Floats) -> Floats:
        """[candidate, block]: when it starts; blocks are in the order of their starts."""
        num, devices = ends.shape[1], self._devices
        side = min(devices, num)
        rounds = np.zeros((len(ends), -(-num // side) * side))
        rounds[:, :num] = ends
        rounds = rounds.reshape(len(ends), -1, side)
        starts = (np.cumsum(rounds, axis=1) - rounds).reshape(len(ends), -1)[:, :num]
        if self._counts.max(initial=1.0) == 1.0:
            return np.asarray(starts)
        before = np.cumsum(counts, axis=1) - counts
        busy = np.maximum(0.0, before - devices + 1.0) / np.maximum(1.0, before) / devices
        is_behind = np.cumsum(counts > 1.0, axis=1) > 0
        return np.where(is_behind, busy * (np.cumsum(ends, axis=1) - ends), starts)


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
    _known: dict[tuple[int, ...], list[Block]] = field(default_factory=dict)
    _apart: dict[tuple[int, float], float] = field(default_factory=dict)  # by row and share: speed without neighbours
    _fitting: dict[tuple[int, ...], list[int] | None] = field(default_factory=dict)

    def merged(self, rows: Sequence[int]) -> list[Block]:
        """Blocks of these rows, merged while that saves completion time; groups that run already come first."""
        schedule = self._others(rows)
        blocks = self._held_blocks(rows, schedule)
        while len(blocks) > 1 and schedule.is_short(len(blocks)):
            better = self._best_merge(blocks, schedule)
            if better is None:
                break
            blocks = better
        return [block for block in blocks if len(block.rows) > 1]

    def _others(self, rows: Sequence[int]) -> Schedule:
        """The jobs beside these rows."""
        bids, widths = self.bids, self.menu.needs.sum(axis=1)
        others = np.setdiff1d(np.arange(len(bids.weights)), rows)
        ends = (bids.seconds[others] * widths).min(axis=1)
        narrowest = np.array([float(self.menu.jobs[row].spec.narrowest) for row in others.tolist()])
        can_run = np.isfinite(ends) & (ends < _NEVER_S)
        return Schedule(ends[can_run], bids.weights[others[can_run]], narrowest[can_run], float(self.menu.supply.sum()))

    def _held_blocks(self, rows: Sequence[int], schedule: Schedule) -> list[Block]:
        """Running groups (split where measurements favour that), followed by all other rows as single blocks."""
        groups = {tuple(sorted(self.sharers.get(row, ()))) for row in rows}
        found = [group for group in sorted(groups) if len(group) > 1 and set(group) <= set(rows)]
        self._evaluate(found)
        together = {row for group in found for row in group}
        blocks = [self._single(row) for row in rows if row not in together]
        for group in found:
            blocks += self._kept_or_split(group, blocks, schedule)
        return blocks

    def _kept_or_split(self, group: tuple[int, ...], others: Sequence[Block], schedule: Schedule) -> list[Block]:
        """The cheapest way to continue a group: as it is, at other shares, without one of its jobs, or apart.

        A group that is being measured is not changed.
        """
        now, apart = self._now(group), [self._single(row) for row in group]
        if now is None:
            return apart
        if self._is_on_trial(now):
            return [now]
        options = [[now], *[[block] for block in self._known[group]], apart, *self._without_one(group)]
        costs = schedule.costs([[*others, *option] for option in options], self.bids.weights).tolist()
        best = min(range(len(options)), key=lambda place: costs[place])
        if costs[0] - costs[best] <= (_CHANGES - 1.0) * now.cost:
            return [now]
        if options[best] is apart:
            self.trials.refuse(self._ids(group))
            self._known[group] = []
        return options[best]

    def _without_one(self, group: tuple[int, ...]) -> list[list[Block]]:
        """A group of three or more without each of its jobs in turn."""
        if len(group) < 3:
            return []
        rests = [tuple([other for other in group if other != row]) for row in group]
        self._evaluate(rests)
        return [
            [block, self._single(row)] for row, rest in zip(group, rests, strict=True) for block in self._known[rest]
        ]

    def _now(self, rows: tuple[int, ...]) -> Block | None:
        """A running group at the shares that it has."""
        shares = tuple([self._held(row) for row in rows])
        if not self._runs_so(rows, shares):
            return None
        (kept,) = self._retention([(rows, shares)])
        return self._block(rows, shares, kept)

    def _best_merge(self, blocks: Sequence[Block], schedule: Schedule) -> list[Block] | None:
        """The blocks after the merge that saves most; None: none saves enough."""
        able = [block for block in blocks if not self._is_on_trial(block)]
        pairs = [pair for pair in combinations(able, 2) if len(pair[0].rows) + len(pair[1].rows) <= self.most]
        self._evaluate([_union(*pair) for pair in pairs])
        found = [
            [*[block for block in blocks if block not in pair], joint]
            for pair in pairs
            for joint in self._known[_union(*pair)]
        ]
        if not found:
            return None
        before, *costs = schedule.costs([blocks, *found], self.bids.weights).tolist()
        least = [0.0 if merged[-1].is_held else (_SAVES - 1.0) * merged[-1].cost for merged in found]
        saved = [before - cost - margin for cost, margin in zip(costs, least, strict=True)]
        best = max(range(len(found)), key=lambda place: saved[place])
        return found[best] if saved[best] > 0.0 else None

    def _is_on_trial(self, block: Block) -> bool:
        """Whether the group runs and is about to be measured: until then no job joins it."""
        is_new = block.is_held and not block.is_measured
        return is_new and self.trials.is_young(self._mix(block.rows, block.shares), self.view.at)

    def _single(self, row: int) -> Block:
        seconds, weight = float(self.bids.seconds[row, self.column]), float(self.bids.weights[row])
        seconds += self._late_s(row, 1.0)
        return Block((row,), (1.0,), (1.0,), weight * seconds, seconds)

    def _evaluate(self, groups: Iterable[tuple[int, ...]]) -> None:
        """Evaluate groups at their candidate shares, all in one query."""
        missing = [rows for rows in dict.fromkeys(groups) if rows not in self._known]
        vectors = {rows: self._vectors(rows) if self._fits(rows) else [] for rows in missing}
        answers = iter(self._retention([(rows, vector) for rows in missing for vector in vectors[rows]]))
        for rows in missing:
            blocks = [self._block(rows, vector, next(answers)) for vector in vectors[rows]]
            firsts = (min(blocks, key=key) for key in (lambda b: b.cost, lambda b: b.end_s)) if blocks else ()
            self._known[rows] = list(dict.fromkeys(firsts))

    def _retention(self, groups: Sequence[tuple[tuple[int, ...], Shares]]) -> Sequence[Sequence[Estimate]]:
        """The speed that each member of groups keeps; and, for `_apart`, what it keeps at its share alone."""
        caps = [cap for rows, shares in groups for cap in zip(rows, shares, strict=True)] if self._has_caps else []
        new = [(row, share) for row, share in dict.fromkeys(caps) if share < 1.0 and (row, share) not in self._apart]
        asked = [self._mix(*group) for group in groups] + [self._mix((row,), (share,)) for row, share in new]
        answers = self.view.estimates.retention(self.kind, asked) if asked else ()
        for cap, (alone,) in zip(new, answers[len(groups) :], strict=True):
            self._apart[cap] = min(1.0, alone.mean)
        return answers[: len(groups)]

    def _vectors(self, rows: tuple[int, ...]) -> list[Shares]:
        """Candidate shares: present ones, with equal ones for new members; equal for all. Exact jobs keep theirs."""
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
        """Jobs with shares and batch sizes: those of the running group, else the best ones alone with which all fit."""
        specs = [self.menu.jobs[row].spec for row in rows]
        if self._runs_so(rows, shares):
            batches = [0 if (held := self.menu.jobs[row].desired) is None else held.batch_size for row in rows]
        else:
            batches = self._batches(tuple(rows)) or [0] * len(rows)
        return list(zip(specs, shares, batches, strict=True))

    def _batches(self, rows: tuple[int, ...]) -> list[int] | None:
        if rows not in self._fitting:
            self._fitting[rows] = fitting_batches(self.view, self.menu, rows, self.kind, self.column)
        return self._fitting[rows]

    def _block(self, rows: tuple[int, ...], shares: Shares, kept: Sequence[Estimate]) -> Block:
        weights = [float(self.bids.weights[row]) for row in rows]
        seconds = [float(self.bids.seconds[row, self.column]) for row in rows]
        rest = max(seconds)
        is_held = self._runs_so(rows, shares)
        hope = _OPTIMISM * max(0.0, 1.0 - _TRIAL_S / max(rest, _LEAST))
        if set(rows) <= self.sharers.get(rows[0], set()):  # at least these jobs share a device already: no trial
            hope = 0.0 if is_held else -_OPTIMISM
        speeds = tuple([min(1.0, each.mean + hope * each.std) for each in kept])
        late = [0.0 if is_held else self._late_s(row, share) for row, share in zip(rows, shares, strict=True)]
        caps = list(zip(rows, shares, strict=True))
        cost, end_s = completion(
            weights,
            [s + x * each for s, each, x in zip(seconds, late, speeds, strict=True)],
            [
                LanePace(speed, self._apart.get(cap, 1.0), float(self.bids.move_s[cap[0]]))
                for cap, speed in zip(caps, speeds, strict=True)
            ],
            is_open_ended=bool(self.bids.is_unknown[list(rows)].all()),
        )
        is_measured = all(each.std <= SETTLED * each.mean for each in kept) or (
            is_held and self.trials.is_measured(self.view, self.kind, self._mix(rows, shares))
        )
        batches = tuple([batch_size for _, _, batch_size in self._mix(rows, shares)])
        moves = [x for row, x in zip(rows, late, strict=True) if self._held(row)]
        return Block(rows, shares, speeds, cost, end_s, is_held, is_measured, max(moves, default=0.0), batches)

    def _late_s(self, row: int, share: float) -> float:
        """Seconds until a waiting job computes, or for which a running one stops to change its share."""
        held = self._held(row)
        if held == share:
            return 0.0
        return float((self.bids.move_s if held else self.bids.start_s)[row])

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
        return self._batches(tuple(rows)) is not None


def fitting_batches(view: Snapshot, menu: Menu, rows: Sequence[int], kind: Kind, column: int) -> list[int] | None:
    """Batch sizes with which jobs fit on one device; 0 means a job's own, None that nothing fits.

    The search starts from each job's best batch size alone and halves sizes until memory suffices.
    """
    specs = [menu.jobs[row].spec for row in rows]
    batches = [int(menu.batches[row, column]) for row in rows]
    there = view.cluster.least_memory.get(kind, 0)
    while there:
        memory = [_memory(view.estimates, spec, batch) for spec, batch in zip(specs, batches, strict=True)]
        if sum(memory) <= there:
            break
        able = [i for i, spec in enumerate(specs) if spec.batch_range and batches[i] > spec.batch_range[0]]
        if not able:
            return None
        most = max(able, key=lambda place: memory[place])
        low, _ = specs[most].batch_range or (0, 0)
        batches[most] = max(low, batches[most] // 2)
    return batches


def _memory(estimates: Estimator, spec: JobSpec, batch_size: int) -> float:
    """What a job may need: at least what it declares, which the core counts whatever its batch."""
    tuned = _MARGIN * estimates.memory(spec, batch_size) if batch_size else 0.0
    return max(tuned, memory_of(estimates, spec))


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
