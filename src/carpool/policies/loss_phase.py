"""Loss-phase: devices by how much every training still has to learn, read from its loss curve."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from carpool.core.draft import Draft
from carpool.core.errors import InputError
from carpool.core.estimates import Estimate
from carpool.core.model import Job, Kind
from carpool.core.policy import Plan, Policy, Snapshot
from carpool.policies.clearing import clearing_shares
from carpool.policies.inheritance import Array, whole_shares
from carpool.policies.registry import register
from carpool.policies.resizing import resize
from carpool.policies.speeds import all_there_is, kind_held, kinds_of, rate_on

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
        there = all_there_is(view)
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
            found = clearing_shares(tables, [min(stake.left.mean, _ENDLESS) for stake in stakes], num_devices)
        else:
            found = whole_shares(tables, [stake.job.spec.weight for stake in stakes], num_devices)
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

    def speeds(self, view: Snapshot, num_devices: int) -> Array:
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
