"""Loss-phase: allocates devices by the remaining learning predicted from each loss curve.

A deal c gives job j c_j devices; it is used for t_c seconds, in whatever order:

    min Σ_c t_c   subject to   Σ_c t_c · s_j(c_j) ≥ R_j for every job j, t ≥ 0.

There are too many deals to list, so they are found as they are needed: with v_j the price of the j-th condition, a
deal is worth using if Σ_j v_j · s_j(c_j) > 1, and the best of them is a knapsack (Gilmore and Gomory 1961).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.optimize import linprog

from carpool.core.draft import Draft
from carpool.core.errors import InputError
from carpool.core.estimates import Estimate
from carpool.core.model import Job, Kind
from carpool.core.policy import Plan, Policy, Snapshot
from carpool.policies.elastic_allocation import DeviceSplit, Floats, best_deal, elastic_split, resize
from carpool.policies.estimator_queries import devices_in_use_or_free, kind_held, kinds_of, rate_on
from carpool.policies.registry import register

_ROUNDS = 50
_ENOUGH = 1.0 + 1e-6


def makespan_split(speeds: Sequence[Floats], work: Sequence[float], num_devices: int) -> DeviceSplit:
    """The deal to begin with, and the prices: of those that are in use, the one that does most for the shortest.

    ``speeds[j][k]`` is job j's rate on k devices, k = 0 … num_devices; jobs in any order, each able to run.
    """
    needed = np.maximum(np.array(work, float), max(1e-9, 1e-6 * max(work)))  # nobody is quite done, or it would be over
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
    """The program over the deals known so far, with every condition divided by R_j: all are alike in size."""
    rates = np.array([[table[k] for table, k in zip(speeds, each, strict=True)] for each in deals]).T
    portions = rates / needed[:, None]
    solved = linprog(np.ones(len(deals)), A_ub=-portions, b_ub=-np.ones(len(needed)), method="highs")
    assert solved.x is not None, solved.message
    worth = -np.asarray(solved.ineqlin.marginals) / needed
    return _Solved(np.asarray(solved.x), portions, worth.tolist())


_ENDLESS = 1e9  # units of work of a job whose length nobody knows
_UNSURE = 0.5  # a spread of more than this part of what remains


@register("loss-phase")
@dataclass(frozen=True, slots=True)
class LossPhase(Policy):
    """Whoever is nearer to its end holds more, as far as its speed table makes it worth it; the others inherit.

    What remains of a training is what the estimates say, for one that ends at a loss by its loss curve, so that a
    pre-trained newcomer counts as old at once. Devices of each kind go where Σ v_j·s_j(k_j) is largest, v_j being what
    a unit of job j's work costs all jobs together when those who end leave their devices to the others
    (`inheritance.whole_shares`), or, with `objective=total`, what it costs the end of the last (`clearing`). Speed
    tables s_j are taken as measured, neither concave nor monotone. Generalises Wei and Shudo, "Dynamic Computing
    Resources Allocation for Multiple Deep Learning Tasks", from two jobs on four GPUs.
    """

    objective: str = "jct"  # the sum of weighted completion times; or `total`, the end of the last
    interval_s: float = 20.0  # look again after so long, after a quarter of it while a curve is unsure; 0: never
    stickiness: float = 0.03  # a new deal must be better by this part

    def __post_init__(self) -> None:
        """Check the objective."""
        if self.objective not in ("jct", "total"):
            raise InputError(f"objective is {self.objective!r}", way_out="Write objective=jct or objective=total.")

    def plan(self, view: Snapshot) -> Plan:
        """Divide each kind among the jobs that are on it."""
        stakes = _stakes(view)
        if not stakes:
            return Plan.NOTHING
        there = devices_in_use_or_free(view)
        draft = Draft(view)
        words: list[str] = []
        for kind, num_devices in there.items():
            words += self._deal(draft, [stake for stake in stakes if stake.kind == kind], kind, num_devices)
        reason = f"by what is left to learn: {'; '.join(words)}" if words else "nobody can be given devices"
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
        for stake, count in zip(stakes, counts, strict=True):
            if not count:
                draft.release(stake.job)
        order = sorted(zip(stakes, counts, strict=True), key=lambda pair: pair[1] - pair[0].held)
        for stake, count in order:  # shrinking first
            if count and not resize(draft, stake.job, kind, count):
                draft.release(stake.job)
        return [_told(stake, count) for stake, count in zip(stakes, counts, strict=True)]

    def _next_look(self, view: Snapshot, stakes: list[_Stake]) -> float | None:
        """With several jobs there is something to correct; soon, while something is unsure."""
        if len(stakes) < 2 or not self.interval_s:
            return None
        unsure = any(stake.job.desired is not None and stake.is_unsure for stake in stakes)
        return view.at + (0.25 * self.interval_s if unsure else self.interval_s)


class _Stake(NamedTuple):
    """A job in the deal."""

    job: Job
    kind: Kind
    held: int
    left: Estimate

    @property
    def is_unsure(self) -> bool:
        return self.left.std > _UNSURE * self.left.mean

    def speeds(self, view: Snapshot, num_devices: int) -> Floats:
        """Its rate on 0, 1, … devices; nothing where it does not accept so few, and no more than it can use."""
        spec = self.job.spec
        table = np.zeros(num_devices + 1)
        for count in range(spec.narrowest, min(spec.widest, num_devices) + 1):
            table[count] = rate_on(view, spec, self.kind, count)
        return table


def _stakes(view: Snapshot) -> list[_Stake]:
    """Every job with a kind: the one it is on, else the one where it would get on best beside those already there."""
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
    """How fast the job would be with all it could have of a kind."""
    there = min(job.spec.widest, view.cluster.capacity[kind])
    return rate_on(view, job.spec, kind, max(there, job.spec.narrowest))


def _told(stake: _Stake, count: int) -> str:
    left = stake.left
    spread = f" ± {left.std:.0f}" if left.std else ""
    return f"{stake.job.id} has {left.mean:.0f}{spread} left and {'waits' if not count else f'holds {count}'}"
