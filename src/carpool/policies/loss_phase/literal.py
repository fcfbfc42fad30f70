"""Loss-phase as published: of two trainings, the one whose loss falls more slowly gets more devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import TypedDict

from carpool.core.draft import Draft
from carpool.core.errors import InputError
from carpool.core.model import Job, JobId, Kind
from carpool.core.policy import Plan, Policy, Snapshot
from carpool.policies.elastic_allocation import resize
from carpool.policies.estimator_queries import devices_in_use_or_free, kind_held, kinds_of
from carpool.policies.registry import register

_SOON_S = 1.0  # plan again this soon while a job has not reported its rate or loss


class _Note(TypedDict):
    """State between plans: the compared pair, their steps at the start, and the result."""

    pair: list[str]
    since: list[float]
    older: str
    why: str


@register("loss-phase-literal")
@dataclass(frozen=True, slots=True)
class LossPhaseLiteral(Policy):
    """A second job gets half the devices for 100 iterations; then the older job gets three quarters.

    Older is the job whose loss fell less in those iterations. When one ends the other takes everything. The rule is
    for two jobs; more wait in order of submission. Without losses, the job submitted first is older. Wei and Shudo,
    "Dynamic Computing Resources Allocation for Multiple Deep Learning Tasks" (four GPUs: 2-2, then 3-1).
    """

    iterations: int = 100
    batch: str = "job"  # batch size kept when the number of devices changes: of the `job`, or of each `device`

    def __post_init__(self) -> None:
        if self.batch not in ("job", "device"):
            raise InputError(f"batch is {self.batch!r}", way_out="Write batch=job or batch=device.")

    def plan(self, view: Snapshot) -> Plan:
        active = sorted(view.active(), key=lambda job: (job.desired is None, job.seq))
        pair = sorted(active[:2], key=lambda job: job.seq)
        if not pair:
            return Plan.NOTHING
        note = self._compared(view, pair)
        draft = Draft(view)
        counts = _divided(view, pair, note["older"])
        growth = [counts[job.id][1] - (job.desired.num_devices if job.desired else 0) for job in pair]
        for _, job in sorted(zip(growth, pair, strict=True), key=lambda each: each[0]):  # shrinking first
            kind, count = counts[job.id]
            if not count or not resize(draft, job, kind, count):
                continue
            self._keep_batch(draft, job)
        queue = f"; {len(active) - 2} more wait, since the rule is for two jobs" if len(active) > 2 else ""
        wake_at = None if note["older"] or len(pair) < 2 else view.at + self._left_s(view, pair, note)
        return draft.finish(note["why"] + queue, wake_at=wake_at, note=note)

    def _compared(self, view: Snapshot, pair: Sequence[Job]) -> _Note:
        """The state of the pair: started, still compared, or decided."""
        names = [str(job.id) for job in pair]
        before = view.note
        if len(pair) < 2:
            return {"pair": names, "since": [], "older": "", "why": f"{names[0]} is alone and gets all devices"}
        if not isinstance(before, dict) or before.get("pair") != names:
            since = [job.done_at(view.at) for job in pair]
            return {"pair": names, "since": since, "older": "", "why": f"{' and '.join(names)} are compared"}
        note = _Note(pair=names, since=before["since"], older=before["older"], why=before["why"])
        made = self._made(view, pair, note)
        if not note["older"] and made >= self.iterations:
            seen = view.estimates
            falls = [seen.learning(job.id, self.iterations) for job in pair] if seen.follows_losses else []
            if falls and None in falls and made < 2 * self.iterations:
                return note  # reports are still to come
            note["older"], note["why"] = self._judged(pair, [fall[0] for fall in falls if fall is not None])
        return note

    def _judged(self, pair: Sequence[Job], falls: Sequence[float]) -> tuple[str, str]:
        """The older job, and why."""
        if len(falls) < 2:
            return str(pair[0].id), f"{pair[0].id} was submitted before {pair[1].id}; not both report a loss"
        older, younger = (0, 1) if falls[0] <= falls[1] else (1, 0)
        gap = [f"{fall:.3g}" for fall in falls]
        why = (
            f"{pair[younger].id} is younger: its loss fell by {gap[younger]} in {self.iterations} iterations, that of "
            f"{pair[older].id} by {gap[older]}"
        )
        return str(pair[older].id), why

    def _made(self, view: Snapshot, pair: Sequence[Job], note: _Note) -> float:
        """Iterations that both have made since the comparison started."""
        return min([job.done_at(view.at) - since for job, since in zip(pair, note["since"], strict=True)]) + 1e-6

    def _left_s(self, view: Snapshot, pair: Sequence[Job], note: _Note) -> float:
        lacking = [
            self.iterations - (job.done_at(view.at) - since) for job, since in zip(pair, note["since"], strict=True)
        ]
        times = [steps / job.rate if job.rate > 0.0 else inf for job, steps in zip(pair, lacking, strict=True)]
        longest = max(times)
        return longest if 0.1 < longest < inf else _SOON_S

    def _keep_batch(self, draft: Draft, job: Job) -> None:
        spec, held = job.spec, draft.holding(job)
        if self.batch == "device" and spec.batch_size and held is not None:
            batch_size = max(1, spec.batch_size * held.num_devices // spec.devices)
            draft.assign(job, held._replace(batch_size=0 if batch_size == spec.batch_size else batch_size))


def _divided(view: Snapshot, pair: Sequence[Job], older: str) -> dict[JobId, tuple[Kind, int]]:
    """Device type and count for each of the pair: all, half, or three quarters; 0 for one that must wait."""
    there = devices_in_use_or_free(view)
    found: dict[JobId, tuple[Kind, int]] = {}
    for job in pair:
        kinds = kinds_of(view, job.spec, job.spec.narrowest)
        has_way = kinds and len(job.lane) < 2
        kind = kind_held(view, job) or (max(kinds, key=lambda kind: there[kind]) if has_way else None)
        if kind is not None and (job.desired is not None or job.spec.narrowest <= there[kind]):
            found[job.id] = kind, min(job.spec.widest, there[kind])
    if len(found) < 2 or len({kind for kind, _ in found.values()}) == 2:
        return {job.id: found.get(job.id, (Kind(""), 0)) for job in pair}
    kind, devices = found[pair[0].id][0], there[found[pair[0].id][0]]
    first, second = pair
    if not older:
        portion = devices - devices // 2
    else:
        portion = devices - max(1, devices // 4)
        first, second = (first, second) if first.id == older else (second, first)
    if first.spec.narrowest + second.spec.narrowest > devices:
        first, second = sorted(pair, key=lambda job: (job.desired is None, job.seq))
        return {first.id: (kind, min(first.spec.widest, devices)), second.id: (kind, 0)}
    portion = max(first.spec.narrowest, min(portion, first.spec.widest, devices - second.spec.narrowest))
    rest = min(second.spec.widest, devices - portion)
    portion = min(first.spec.widest, devices - rest)
    return {first.id: (kind, portion), second.id: (kind, rest)}
