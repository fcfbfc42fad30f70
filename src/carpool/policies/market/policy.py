"""Market policies `carpool` (the default) and `elastic`: devices go where they save most weighted completion time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import ClassVar

import numpy as np

from carpool.core.constraints.pinned_jobs import is_pinned
from carpool.core.constraints.priorities import weight_with_priority
from carpool.core.draft import Draft
from carpool.core.errors import InputError, UnknownName
from carpool.core.model import Job, JobId
from carpool.core.policy import Plan, Policy, Snapshot
from carpool.policies.market.aging import aged, classes_of, overdue, patience_of
from carpool.policies.market.colocation_groups import ColocationGroups, form_groups, group_lanes, lane_blocks
from carpool.policies.market.explain import Quote, bid_order, explain_aging, explain_job, explain_prices
from carpool.policies.market.group_trials import explain_sharing
from carpool.policies.market.knapsack import NONE, Choices, solve_knapsack
from carpool.policies.market.lane_groups import MOST, Bids, Block
from carpool.policies.market.menu import GrowthLimits, Menu, build_menu
from carpool.policies.market.placement import place_all
from carpool.policies.market.policy_memory import EstimateCache, PolicyMemory
from carpool.policies.market.prices import Floats, Market, ends, relative_prices
from carpool.policies.market.uncontended import plan_uncontended
from carpool.policies.registry import register

_UNPREDICTED = 2  # jobs on one device if the estimator cannot predict the effect of shares
_WITH_GROUPS = 0.6  # how far prices may fall because jobs share devices
_ROUNDS = 2  # of prices and the order of completion, which depend on each other
_REPLACED = 0.5  # share of the completed jobs assumed to be replaced by new arrivals, if jobs arrive
_STAYS = 1.02  # bonus on the current holding, so that ties move no job
_LEAST = 0.01  # least part of a job's value that remains, however expensive a move is
_TINY = 1e-9  # least work
_STARTED = 0.5  # share of its length that a job is assumed to have left between its start and its first report
_YOUNG_S = 300.0  # least remaining time assumed for a job of unknown length
# exponent of the number of steps in the length assumed for a job that never ran: if they are few, each is often longer
_BY_STEPS = 0.3
_HOPE = 0.5  # how much shorter than typical a job that never ran is assumed to be, if trying it is cheap
# What it may cost to try a job that never ran: its start, and the move of the job that it displaces.
_FIRST_LOOK_S = 10.0
_LOOK_S, _PATIENCE_S = 1.0, 15.0  # between plans while a job runs for the first time, and until when
_EXPLAINED = 2  # most changes that a plan's reason explains one by one


@register("carpool")
@dataclass(frozen=True, slots=True)
class Carpool(Policy):
    """Market-clearing prices per device type, and an exact assignment of jobs at the margin (`prices`, `knapsack`).

    The value of an option o to a job j is λ_j · g_j(o): its rate g_j(o) there, in units of work per second, times the
    value λ_j of a unit of its work at the current prices. If the job would have to move, the value is multiplied by
    (h − move)/h: h is its remaining time, at most `horizon_s`, and `move` the seconds that the move costs. While rates
    are estimates, staying counts `trust` times, and no job gets more than `growth` times the devices it has tried. A
    job of unknown length is taken to be half done. Weights grow with waiting time, so no job starves. Jobs worth more
    together than apart share devices (`colocation_groups`).

    With `objective` makespan a job's weight is its shortest run time, and prices do not fall over time: the longest
    jobs come first, each on its comparatively fastest devices.
    """

    shares_devices: ClassVar[bool] = True
    max_virtual: ClassVar[float] = float(MOST)
    tunes: ClassVar[bool] = True  # whether it also chooses batch sizes, where jobs allow it

    objective: str = "jct"
    lengths: str = "known"
    together: int = 0  # most jobs on one device; 0: eight where the estimator predicts what shares do, else two
    growth: int = 4
    trust: float = 1.1
    move_s: float = 0.1  # cost of a move the estimator does not know
    horizon_s: float = 1000.0
    patience_s: float = 600.0  # a job that waited this long, or as long as shorter jobs take, counts more and more
    wait_s: float = 7200.0  # after which the job that waited longest counts far more; longer in long queues; 0: never
    interval_s: float = 60.0  # plan again after this, or up to four times as often, while rates are estimates
    _memo: EstimateCache = field(default_factory=EstimateCache, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, value, words in (
            ("objective", self.objective, ("jct", "makespan")),
            ("lengths", self.lengths, ("known", "unknown")),
        ):
            if value not in words:
                raise UnknownName(name, value, words)
        if self.growth < 2:
            raise InputError(
                f"growth is {self.growth}",
                way_out="Give 2 or more, so that jobs can get more devices than they have tried.",
            )
        if self.together < 0 or self.trust < 1.0 or self.patience_s <= 0.0 or self.wait_s < 0.0:
            raise InputError(
                f"together {self.together}, trust {self.trust}, patience_s {self.patience_s} or wait_s "
                f"{self.wait_s} is too small",
                way_out="Such as carpool:together=2:trust=1.1:patience_s=600:wait_s=7200.",
            )

    def plan(self, view: Snapshot) -> Plan:
        if self.lengths == "known" and (simple := plan_uncontended(view, self.patience_s)) is not None:
            return simple
        memory = PolicyMemory.of(view)
        before = memory.outlook
        quote = self._quote(view, memory)
        if quote is None:
            return Plan.NOTHING
        menu = quote.menu
        groups, choice = self._assign(view, quote, memory)
        groups.start_in_order(menu.jobs, choice)
        draft = Draft(view)
        place_all(draft, menu, groups, choice)
        memory.clocks.keep(menu.jobs, quote.credit, draft)
        has_trials = view.estimates.predicts_retention and (draft.occupancy.is_shared or memory.trials.since)
        if menu.is_sure.all() and self.lengths == "known" and not has_trials:
            is_new = memory.outlook is not before or memory.clocks.is_changed
            note = memory.note(view, lengths=False) if is_new else None
            plan = draft.finish(self._reason(draft, quote), note=note)
            return plan if plan.changes or plan.note else Plan.NOTHING
        memory.see(menu.jobs, draft)
        wake_at = self._wake_at(view, quote, draft)
        look_at = memory.trials.review(draft) if view.estimates.predicts_retention else None
        note = memory.note(view, lengths=self.lengths == "unknown")
        wake_at = wake_at if look_at is None else min(wake_at, look_at)
        return draft.finish(self._reason(draft, quote), wake_at=wake_at, note=note)

    def why(self, view: Snapshot, job: Job) -> str:
        if job.id not in view.waiting:
            return explain_sharing(view, job)
        quote = self._quote(view, PolicyMemory.of(view))
        return "" if quote is None else explain_aging(quote, job)

    def details(self, view: Snapshot, job: Job) -> str:
        quote = self._quote(view, PolicyMemory.of(view))
        if quote is None or all(job.id != other.id for other in quote.menu.jobs):
            return ""
        return f"{explain_job(quote, job, lambda other: other.desired)}; {explain_prices(quote)}"

    def start_order(self, view: Snapshot) -> Sequence[JobId]:
        quote = self._quote(view, PolicyMemory.of(view))
        return tuple(view.waiting) if quote is None else bid_order(quote)

    def _quote(self, view: Snapshot, memory: PolicyMemory) -> Quote | None:
        """The menu and its prices; None without jobs or devices."""
        jobs = sorted(view.active(), key=lambda job: job.seq)
        if not jobs:
            return None
        self._memo.keep_for(view.estimates, view.cluster)
        menu = build_menu(view, jobs, memory.tried, GrowthLimits(self.growth, self.trust, self.tunes), self._memo)
        if not menu.offers:
            return None
        work = self._work(view, menu, memory)
        lengths, weights = _lengths(menu, work), np.array([job.spec.weight for job in jobs])
        classes = classes_of(lengths / weights)
        paces = patience_of(lengths, classes, float(menu.supply.sum()), self.patience_s)
        memory.clocks.advance(view.at, paces, min([job.submitted_at for job in jobs]))
        credit = memory.clocks.credit(jobs, classes, view.at)
        late = overdue(view, jobs, lengths, self.wait_s if self.lengths == "known" else 0.0)
        weights = aged(weights, credit + late)
        market = Market(menu.rates, menu.needs, menu.supply, weights, work)
        if self.objective == "makespan":
            market = Market(menu.rates, menu.needs, menu.supply, market.seconds().min(axis=1).clip(_TINY, 1e12), work)
        prices, worths = self._prices(view, market, jobs, _ranks(jobs), memory)
        return Quote(menu, market, prices, worths, credit, late)

    def _prices(
        self, view: Snapshot, market: Market, jobs: Sequence[Job], ranks: Floats, memory: PolicyMemory
    ) -> tuple[Floats, Floats]:
        """Clearing prices, and the worth of a unit of each job's work at these; for `ranks` see `_cleared`."""
        if self.objective == "makespan":
            parts = np.zeros(len(jobs))
            prices = market.clear(parts)
        else:
            along = self._relative_prices(market, view.at, memory)
            prices, parts = _cleared(market, _replaced(market, jobs, view.at), along, ranks)
        return prices, market.worths(prices, parts)

    def _relative_prices(self, market: Market, at: float, memory: PolicyMemory) -> Floats | None:
        """Prices of device types relative to each other, refreshed when outdated; None with one device type."""
        if len(market.supply) == 1 or market.is_large:
            return None
        if memory.outlook is None or not memory.outlook.holds(market, at):
            memory.outlook = relative_prices(market, at)
        return memory.outlook.along

    def _work(self, view: Snapshot, menu: Menu, memory: PolicyMemory) -> Floats:
        """Units of work left of each job: the estimate, else what jobs of its model took, else as much as it has done.

        A job that has not run yet and whose rates are estimates is assumed to need `_YOUNG_S`; where not even the scale
        of its rates is known, `_unknown_s`.
        """
        known, at = self.lengths == "known", view.at
        if known and menu.is_sure.all():
            lefts = np.array(view.estimates.remaining_of(menu.jobs, at))
            if np.isfinite(lefts).all():
                return np.asarray(np.maximum(lefts, _TINY))
        work: Floats = np.maximum(_YOUNG_S * menu.rates.max(axis=1), _TINY)
        unknown: list[int] = []
        for row, (job, is_sure) in enumerate(zip(menu.jobs, menu.is_sure.tolist(), strict=True)):
            if not is_sure and not view.estimates.knows_scale(job.spec):
                unknown.append(row)
                continue
            if is_sure or job.service or (job.desired is not None and view.attained_s(job)):
                left = view.estimates.remaining(job, at).mean if known else memory.left(job, at)
                work[row] = max(left, _TINY) if left is not None and isfinite(left) else max(job.done_at(at), work[row])
        if unknown:
            work[unknown] = self._unknown_s(view, menu, work, unknown) * menu.rates[unknown].max(axis=1) + _TINY
        runs = [row for row in unknown if menu.held[row] != NONE]
        work[runs] *= _STARTED
        return work

    def _unknown_s(self, view: Snapshot, menu: Menu, work: Floats, unknown: Sequence[int]) -> Floats:
        """Assumed seconds of jobs that never ran: the median of the others, scaled by steps, then reduced by `hope`.

        The reduction starts such a job early. Its rate is then known within seconds; without it, a job that is in fact
        short would wait for all the others.
        """
        done = np.array([job.done_at(view.at) for job in menu.jobs])
        known = np.setdiff1d(np.arange(len(work)), unknown)
        seconds = (work + done)[known] / np.maximum(menu.rates[known].max(axis=1), _TINY)
        typical_s = max(_TINY, float(np.median(seconds))) if len(known) else _YOUNG_S
        steps = np.array([_steps(view, job) for job in menu.jobs])
        others = steps[known] if np.isfinite(steps[known]).any() else steps[unknown]
        if not np.isfinite(others).any():
            return np.full(len(unknown), typical_s)
        relative = steps[unknown] / np.nanmedian(others)
        hope = _HOPE * max(0.0, 1.0 - _FIRST_LOOK_S / typical_s) if len(known) else 0.0
        found = (1.0 - hope) * typical_s * relative**_BY_STEPS
        return np.where(np.isfinite(found), found, typical_s)

    def _assign(self, view: Snapshot, quote: Quote, memory: PolicyMemory) -> tuple[ColocationGroups, Choices]:
        """The co-location groups, and the option of each."""
        if self.shares_devices and self.together != 1 and view.estimates.predicts_retention:
            return self._assign_lanes(view, quote, memory)
        menu, prices = quote.menu, quote.prices
        values, stays = self._values(view, quote, memory)
        most = self.together or _UNPREDICTED
        found: list[tuple[float, ColocationGroups, Choices]] = []
        for level in (prices, _WITH_GROUPS * prices):  # sharing lowers prices; the assignment worth more counts
            groups = form_groups(view, menu, quote.worths, values, stays, level, most=most, known=self._memo)
            choice = solve_knapsack(groups.values, menu.needs, menu.supply, level)
            runs = np.flatnonzero(choice != NONE)
            found.append((float(groups.values[runs, choice[runs]].sum()), groups, choice))
            if len(groups) == len(menu.jobs):
                break
        _, groups, choice = max(found, key=lambda each: each[0])
        return groups, choice

    def _assign_lanes(self, view: Snapshot, quote: Quote, memory: PolicyMemory) -> tuple[ColocationGroups, Choices]:
        """As `_assign`, with chosen shares. Blocks that run while devices of their type stay free are split."""
        menu = quote.menu
        blocks = lane_blocks(view, menu, self._bids(view, quote, memory), memory.trials, most=self.together or MOST)
        while True:
            groups, choice = self._assign_blocks(view, quote, memory, blocks)
            idle = menu.supply - menu.needs[choice[choice != NONE]].sum(axis=0)
            runs = {groups.rows(place) for place in np.flatnonzero(choice != NONE).tolist()}
            needless = [block for block in blocks if block[1].rows in runs and (menu.needs[block[0]] <= idle).all()]
            if not needless:
                return groups, choice
            blocks.remove(needless[0])

    def _assign_blocks(
        self, view: Snapshot, quote: Quote, memory: PolicyMemory, blocks: Sequence[tuple[int, Block]]
    ) -> tuple[ColocationGroups, Choices]:
        """Groups and their options; a block of jobs is priced as one job of their weights."""
        menu, market, bids = quote.menu, quote.market, self._bids(view, quote, memory)
        prices, worths = quote.prices, quote.worths.copy()
        if blocks:
            rows, joint = _with_blocks(market, blocks)
            ranks = _ranks(menu.jobs) * _per_member(market, prices, blocks)
            prices, found = self._prices(view, joint, [menu.jobs[row] for row in rows], ranks[rows], memory)
            worths[rows] = found
            bids = self._bids(view, quote._replace(worths=worths), memory)
        groups = group_lanes(view, menu, bids, blocks, [float(worths[block.rows[0]]) for _, block in blocks])
        return groups, solve_knapsack(groups.values, menu.needs, menu.supply, prices)

    def _bids(self, view: Snapshot, quote: Quote, memory: PolicyMemory) -> Bids:
        market = quote.market
        values, stays = self._values(view, quote, memory)
        jobs, estimates = quote.menu.jobs, view.estimates
        starts = np.array([self.move_s if (s := estimates.move_s(job.spec)) is None else s for job in jobs])
        is_unknown = [not (estimates.knows_scale(job.spec) and estimates.knows_length(job)) for job in jobs]
        moves = self._moves_s(view, jobs)
        return Bids(values, stays, market.seconds(), market.weights, moves, starts, np.array(is_unknown))

    def _values(self, view: Snapshot, quote: Quote, memory: PolicyMemory) -> tuple[Floats, Floats]:
        """[job, offer]: the value of moving there; [job]: the value of staying."""
        menu, market, worths = quote.menu, quote.market, quote.worths
        move = self._moves_s(view, menu.jobs)
        rest = np.clip(market.seconds(), _TINY, self.horizon_s)
        runs = menu.held != NONE
        kept = np.where(runs[:, None], np.maximum(_LEAST, 1.0 - move[:, None] / rest), 1.0)
        values = worths[:, None] * menu.rates * kept
        stick = np.where(menu.is_sure, _STAYS, self.trust)
        rest_here = np.clip(market.work / np.maximum(menu.stay_rates, 1e-30), _TINY, self.horizon_s)
        stays = worths * menu.stay_rates * stick * (1.0 + np.minimum(1.0, move / rest_here))
        # All options, staying included, gain the same value, so the job is harder to preempt and no harder to resize.
        least = np.where(values > 0.0, values, np.inf).min(axis=1)
        able = runs & np.isfinite(least)
        again = memory.clocks.preemption_factors(menu.jobs) - 1.0
        charge = np.maximum(move, self.move_s) * again / rest_here
        extra = np.where(able, charge, 0.0) * np.where(able, least, 0.0)
        return np.where(values > 0.0, values + extra[:, None], 0.0), stays + extra

    def _moves_s(self, view: Snapshot, jobs: Sequence[Job]) -> Floats:
        """[job]: seconds that a move costs, lost work included; irrelevant for jobs that hold nothing."""
        found = np.full(len(jobs), self.move_s)
        for row, job in enumerate(jobs):
            if job.desired is not None:
                if (seconds := view.estimates.move_s(job.spec)) is not None:
                    found[row] = seconds
                if is_pinned(job):
                    found[row] += view.at - job.since
        return found

    def _wake_at(self, view: Snapshot, quote: Quote, draft: Draft) -> float:
        """Plan again after a fifth of the shortest remaining time: estimates may have changed by then.

        Soon where a job runs for the first time: it may turn out to be longer than those that wait.
        """
        shortest = float(quote.market.seconds().min(axis=1).min())
        if any(_is_looked_at(view, job) for job in quote.menu.jobs if draft.holding(job) is not None):
            return view.at + _LOOK_S
        return view.at + min(self.interval_s, max(self.interval_s / 4.0, shortest / 5.0))

    def _reason(self, draft: Draft, quote: Quote) -> str:
        menu = quote.menu
        jobs, changes = draft.view.jobs, draft.changes
        runs = int(np.count_nonzero(menu.held != NONE))
        for job_id, change in changes.items():
            runs += (change.allocation is not None) - (jobs[job_id].desired is not None)
        changed = sorted([jobs[name] for name in changes], key=lambda job: job.seq)
        explained = changed if len(changed) <= _EXPLAINED else []
        words = [f"{job.id} {explain_job(quote, job, draft.holding)}" for job in explained]
        return "; ".join([f"{runs} of {len(menu.jobs)} jobs run", explain_prices(quote), *words])


def _is_looked_at(view: Snapshot, job: Job) -> bool:
    """Whether a job of known length has just started for the first time, so that its rate will soon be known."""
    is_new = view.estimates.knows_length(job) and not view.estimates.knows_scale(job.spec)
    return is_new and (job.desired is None or view.at - job.since <= _PATIENCE_S)


def _steps(view: Snapshot, job: Job) -> float:
    """All steps of a job; NaN: unknown."""
    if job.spec.work is not None:
        return max(1.0, job.spec.work)
    if not view.estimates.knows_length(job):
        return float("nan")
    return max(1.0, job.done_at(view.at) + view.estimates.remaining(job, view.at).mean)


def _lengths(menu: Menu, work: Floats) -> Floats:
    """[job]: device-seconds left, at its mean rate on all devices of the cluster; 0 if it can run nowhere.

    On each device type it is taken to run with its most efficient number of devices.
    """
    each = menu.rates / menu.needs.sum(axis=1)
    best = np.array([each[:, needs > 0.0].max(axis=1, initial=0.0) for needs in menu.needs.T])
    with np.errstate(divide="ignore"):
        found = work * menu.supply.sum() / (menu.supply @ best)
    return np.asarray(np.where(np.isfinite(found), found, 0.0))


def _with_blocks(market: Market, blocks: Sequence[tuple[int, Block]]) -> tuple[list[int], Market]:
    """The rows that remain if each block is one job, in the row of its first job; and the market of these rows."""
    rates, weights, work = market.rates.copy(), market.weights.copy(), market.work.copy()
    for column, block in blocks:
        first = block.rows[0]
        rates[first] = 0.0
        rates[first, column], work[first] = 1.0, block.end_s
        weights[first] = market.weights[list(block.rows)].sum()
    gone = {row for _, block in blocks for row in block.rows[1:]}
    rows = [row for row in range(len(work)) if row not in gone]
    return rows, Market(rates[rows], market.needs, market.supply, weights[rows], work[rows])


def _ranks(jobs: Sequence[Job]) -> Floats:
    """[job]: the factor of its priority."""
    return np.array([weight_with_priority(1.0, job.spec.priority) for job in jobs])


def _per_member(market: Market, prices: Floats, blocks: Sequence[tuple[int, Block]]) -> Floats:
    """[job]: factors that order blocks among jobs by their time over their weight.

    A bill is the time times 1 + price / weight; here a block's weight is the mean weight of its members.
    """
    found = np.ones(len(market.work))
    for column, block in blocks:
        weight, price = float(market.weights[list(block.rows)].sum()), float(market.needs[column] @ prices)
        found[block.rows[0]] = (weight + price) / (weight / len(block.rows) + price)
    return found


def _cleared(market: Market, replaced: Floats, along: Floats | None, ranks: Floats) -> tuple[Floats, Floats]:
    """Prices, and per job the fraction of its price still charged when it ends; found by iteration.

    `ranks` [job] are factors: a job of higher rank is taken to end before others of its length.
    """
    parts = np.full(len(market.work), 0.5)
    prices = market.clear(parts, along=along)
    for _ in range(_ROUNDS):
        parts = ends(market.bills(prices) / ranks, market.weights, replaced)
        prices = market.clear(parts, prices, along)
    return prices, parts


def _replaced(market: Market, jobs: Sequence[Job], at: float) -> Floats:
    """[job]: the part of the jobs ending before it that arrivals will replace: none in a batch, else up to half.

    Arrivals are expected to continue for about as long as they have lasted.
    """
    came = np.array([job.submitted_at for job in jobs])
    late = market.weights[came > came.min()].sum() / market.weights.sum()
    seen_s = at - float(came.min()) + _TINY
    return np.asarray(_REPLACED * late * seen_s / (seen_s + market.seconds().min(axis=1)))


@register("elastic")
@dataclass(frozen=True, slots=True)
class Elastic(Carpool):
    """The default policy without sharing and batch tuning: the number and type of devices of each job.

    AFS compares jobs in pairs, the one that ends later inheriting all devices of the other. Prices extend that to all
    jobs, device types, weights, links and resize costs. Hwang et al., "Elastic Resource Sharing for Distributed Deep
    Learning", NSDI 2021.
    """

    shares_devices: ClassVar[bool] = False
    max_virtual: ClassVar[float] = 1.0
    tunes: ClassVar[bool] = False

    together: int = 1
