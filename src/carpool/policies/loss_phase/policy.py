"""Loss-phase: allocates devices by the remaining learning predicted from each loss curve.

An assignment c gives job j c_j devices for t_c seconds, in any order:

    min Σ_c t_c   subject to   Σ_c t_c · s_j(c_j) ≥ R_j for every job j, t ≥ 0.

There are too many assignments to list, so columns are generated: with v_j the dual price of the j-th condition, an
assignment improves if Σ_j v_j · s_j(c_j) > 1, and the best is a knapsack (Gilmore and Gomory 1961).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import neg
from typing import NamedTuple

import numpy as np
from scipy.optimize import linprog

from carpool.core.draft import Draft
from carpool.core.errors import InputError
from carpool.core.estimates import Estimate
from carpool.core.model import Job, Kind
from carpool.core.policy import Plan, Policy, Snapshot
from carpool.core.queue import in_submission_order
from carpool.policies.elastic_allocation import DeviceSplit, Floats, best_deal, elastic_split, resize
from carpool.policies.estimator_queries import devices_in_use_or_free, kind_held, kinds_of, rate_on
from carpool.policies.registry import register

_ROUNDS = 50
_ENOUGH = 1.0 + 1e-6


def makespan_split(speeds: Sequence[Floats], work: Sequence[float], num_devices: int) -> DeviceSplit:
    """The assignment to start with, and the prices: of those used, the one best for the shortest job.

    ``speeds[j][k]`` is job j's rate on k devices, k = 0 … num_devices; jobs in any order, each able to run.
    """
    needed = np.maximum(np.array(work, float), max(1e-9, 1e-6 * max(work)))  # no job counts as quite done
    deals = [
        [int(table.argmax()) if other == job else 0 for other in range(len(speeds))] for job, table in enumerate(speeds)
    ]
    solved = _solve(speeds, needed, deals)
    for _ in range(_ROUNDS):
        found = best_deal(speeds, solved.worth, num_devices)
        if DeviceSplit(found, solved.worth).value(speeds, found) <= _ENOUGH or found in deals:
            break
        deals.append(found)
        solved = _solve(speeds, needed, deals)
    used = np.flatnonzero(solved.seconds >= 1e-6 * solved.seconds.sum())
    first = max(used, key=lambda place: float(solved.portions[:, place].max()))
    return DeviceSplit(deals[first], solved.worth)


class _Solved(NamedTuple):
    seconds: Floats  # of each deal
    portions: Floats  # [job, deal]: the part of the job done in a second
    worth: list[float]


def _solve(speeds: Sequence[Floats], needed: Floats, deals: Sequence[Sequence[int]]) -> _Solved:
    """The program over known assignments, each condition divided by R_j to scale them alike."""
    rates = np.array([[table[k] for table, k in zip(speeds, each, strict=True)] for each in deals]).T
    portions = rates / needed[:, None]
    solved = linprog(np.ones(len(deals)), A_ub=-portions, b_ub=-np.ones(len(needed)), method="highs")
    assert solved.x is not None, solved.message
    worth = -np.asarray(solved.ineqlin.marginals) / needed
    return _Solved(np.asarray(solved.x), portions, worth.tolist())


_ENDLESS = 1e9  # units of work of a job of unknown length
_UNSURE = 0.5  # relative spread from which remaining work is uncertain


@register("loss-phase")
@dataclass(frozen=True, slots=True)
class LossPhase(Policy):
    """Jobs nearer to completion hold more devices, if their speed tables justify it.

    Remaining work is estimated, for a job with a target loss from its loss curve, so a pre-trained job counts as
    old at once. Devices of each type go where Σ v_j·s_j(k_j) is largest, v_j being the cost of a unit of job j's
    work to all jobs when completed jobs leave their devices to the others (`elastic_allocation`), or, with
    `objective=total`, its cost to the makespan. Speed tables s_j are as measured, neither concave nor monotone.
    Generalizes Wei and Shudo, "Dynamic Computing Resources Allocation for Multiple Deep Learning Tasks", from two
    jobs on four GPUs.
    """

    objective: str = "jct"  # weighted completion times; or `total`, the makespan
    interval_s: float = 20.0  # plan again after this, or a quarter of it while a curve is uncertain; 0: never
    stickiness: float = 0.03  # relative improvement required of a new assignment

    def __post_init__(self) -> None:
        if self.objective not in ("jct", "total"):
            raise InputError(f"objective is {self.objective!r}", way_out="Write objective=jct or objective=total.")

    def plan(self, view: Snapshot) -> Plan:
        stakes = _stakes(view)
        if not stakes:
            return Plan.NOTHING
        there = devices_in_use_or_free(view)
        draft = Draft(view)
        words: list[str] = []
        for kind, num_devices in there.items():
            words += self._deal(draft, [stake for stake in stakes if stake.kind == kind], kind, num_devices)
        reason = f"by remaining work: {'; '.join(words)}" if words else "no job can run on the devices"
        plan = draft.finish(reason, wake_at=self._next_look(view, stakes))
        return plan if plan.changes or plan.wake_at is not None else Plan.NOTHING

    def _deal(self, draft: Draft, stakes: list[_Stake], kind: Kind, num_devices: int) -> list[str]:
        tables = [stake.speeds(draft.view, num_devices) for stake in stakes]
        able = [place for place, table in enumerate(tables) if table.max() > 0.0]
        able.sort(key=lambda place: (-stakes[place].left.mean / tables[place].max(), -stakes[place].job.seq))
        stakes, tables = [stakes[place] for place in able], [tables[place] for place in able]
        if not stakes:
            return []
        if self.objective == "total":
            found = makespan_split(tables, [min(stake.left.mean, _ENDLESS) for stake in stakes], num_devices)
        else:
            found = elastic_split(tables, [stake.job.spec.weight for stake in stakes], num_devices)
        held = [stake.held for stake in stakes]
        now = found.value(tables, held) if sum(held) <= num_devices else 0.0
        better = found.value(tables, found.counts) > (1.0 + self.stickiness) * now
        counts = found.counts if better else held
        counts = in_submission_order([stake.job for stake in stakes], counts, key=neg)
        for stake, count in zip(stakes, counts, strict=True):
            if not count:
                draft.release(stake.job)
        order = sorted(zip(stakes, counts, strict=True), key=lambda pair: pair[1] - pair[0].held)
        for stake, count in order:  # shrinking first
            if count and not resize(draft, stake.job, kind, count):
                draft.release(stake.job)
        return [_told(stake, count) for stake, count in zip(stakes, counts, strict=True)]

    def _next_look(self, view: Snapshot, stakes: list[_Stake]) -> float | None:
        """When to plan again: with several jobs, sooner while estimates are uncertain."""
        if len(stakes) < 2 or not self.interval_s:
            return None
        unsure = any(stake.job.desired is not None and stake.left.std > _UNSURE * stake.left.mean for stake in stakes)
        return view.at + (0.25 * self.interval_s if unsure else self.interval_s)


class _Stake(NamedTuple):
    """A job and its device type."""

    job: Job
    kind: Kind
    held: int
    left: Estimate

    def speeds(self, view: Snapshot, num_devices: int) -> Floats:
        """Its rate on 0, 1, … devices; 0 below its minimum, constant above its maximum."""
        spec = self.job.spec
        table = np.zeros(num_devices + 1)
        for count in range(spec.narrowest, min(spec.widest, num_devices) + 1):
            table[count] = rate_on(view, spec, self.kind, count)
        return table


def _stakes(view: Snapshot) -> list[_Stake]:
    """Every job with a device type: the one it holds, else the fastest beside those already there."""
    stakes: list[_Stake] = []
    crowd: dict[Kind, int] = {}
    for job in sorted(view.active(), key=lambda job: (job.desired is None, job.seq)):
        kind = kind_held(view, job)
        if kind is None:
            kinds = kinds_of(view, job.spec, job.spec.narrowest)
            if not kinds:
                continue
            kind = max(kinds, key=lambda kind: _promise(view, job, kind) / (1.0 + crowd.get(kind, 0)))
        crowd[kind] = crowd.get(kind, 0) + 1
        held = 0 if job.desired is None else job.desired.num_devices
        stakes.append(_Stake(job, kind, held, view.estimates.remaining(job, view.at)))
    return stakes


def _promise(view: Snapshot, job: Job, kind: Kind) -> float:
    """The job's rate with all devices it could have of a type."""
    there = min(job.spec.widest, view.cluster.capacity[kind])
    return rate_on(view, job.spec, kind, max(there, job.spec.narrowest))


def _told(stake: _Stake, count: int) -> str:
    left = stake.left
    spread = f" ± {left.std:.0f}" if left.std else ""
    return f"{stake.job.id} has {left.mean:.0f}{spread} units left and {'waits' if not count else f'holds {count}'}"
