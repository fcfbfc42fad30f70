"""Group trials: measures new groups within seconds, so that the next plans keep or split them by measured rates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from carpool.core.draft import Draft
from carpool.core.estimates import Estimator, MixEntry
from carpool.core.messages import Probe
from carpool.core.model import DeviceId, Job, JobId, JobSpec, Kind
from carpool.core.policy import Snapshot
from carpool.core.topology import Neighbour, Placement

SETTLED = 0.15  # relative spread below which a retention counts as measured
_UNKNOWN = 0.25  # relative spread from which a rate alone is unknown
_LOOK_S = 1.0  # between two checks of a new group
_PATIENCE_S = 15.0  # after which a group that cannot be measured is no longer checked
_PROBE_AFTER_S = 1.0  # the first steps are slower: kernels load, graphs are captured
_PROBE_S = 0.3  # length of a probe
_FEWEST_STEPS, _MOST_STEPS = 4, 400  # of a probe
_WORTH_S = 20.0  # least remaining time for which probes pay


@dataclass(slots=True)
class GroupTrials:
    """When each group of jobs on a device was formed, and the jobs that were measured alone."""

    since: dict[str, float] = field(default_factory=dict)  # by the names of the jobs with their shares
    probed: list[JobId] = field(default_factory=list)
    refused: list[frozenset[JobId]] = field(default_factory=list)  # measured to be slower than taking turns

    @classmethod
    def of(cls, note: Any, view: Snapshot) -> GroupTrials:
        since = {str(mix): float(at) for mix, at in note.get("groups", {}).items()}
        refused = [
            frozenset(map(JobId, mix)) for mix in note.get("refused", ()) if all(job in view.jobs for job in mix)
        ]
        return cls(since, [JobId(job) for job in note.get("probed", ()) if job in view.jobs], refused)

    def note(self) -> dict[str, object]:
        """What the next plan needs; nothing where no jobs share."""
        refused = [sorted(mix) for mix in self.refused]
        found: dict[str, object] = {"groups": self.since, "probed": self.probed, "refused": refused}
        return {key: value for key, value in found.items() if value}

    def refuse(self, jobs: Iterable[JobId]) -> None:
        mix = frozenset(jobs)
        if not self.is_refused(mix):
            self.refused.append(mix)

    def is_refused(self, jobs: Iterable[JobId]) -> bool:
        """Whether a group contains one that was slower than taking turns, at whatever shares."""
        mix = frozenset(jobs)
        return any(bad <= mix for bad in self.refused)

    def review(self, draft: Draft) -> float | None:
        """Check shared devices and probe jobs whose rate alone is unknown. Returns when to check again, if needed."""
        if not draft.occupancy.is_shared:
            self.since = {}
            return None
        before, self.since = self.since, {}
        at = draft.view.at
        looks = []
        for device, jobs in _groups(draft):
            mix = _mix(draft, jobs)
            name = _name(mix)
            self.since[name] = before.get(name, at)
            age = at - self.since[name]
            if age <= _PATIENCE_S and not self.is_measured(draft.view, draft.view.cluster.kind_of(device), mix):
                if age >= _PROBE_AFTER_S and not any(job.is_starting for job in jobs):
                    self._probe(draft, jobs)
                looks.append(at + _LOOK_S)
        return min(looks, default=None)

    def is_young(self, mix: Iterable[MixEntry], at: float) -> bool:
        """Whether a group was formed so recently that its measurement is still awaited."""
        return at - self.since.get(_name(mix), at) <= _PATIENCE_S

    def is_measured(self, view: Snapshot, kind: Kind, mix: Sequence[MixEntry]) -> bool:
        """Whether the speeds of a running group's jobs are known, both together and alone.

        A probe measures a job's speed alone, if the job runs long enough for that to pay.
        """
        together = [view.estimates.rate(*_among(mix, place, kind)) for place in range(len(mix))]
        if any(rate.std > SETTLED * rate.mean for rate in together):
            return False
        kept = view.estimates.retention(kind, [mix])[0]
        return all(
            each.std <= SETTLED * each.mean or spec.id in self.probed or _rest_s(view, view.jobs[spec.id]) <= _WORTH_S
            for (spec, _, _), each in zip(mix, kept, strict=True)
        )

    def _probe(self, draft: Draft, jobs: list[Job]) -> None:
        view = draft.view
        for job in jobs:
            held = draft.holding(job)
            if held is None or held != job.desired or job.id in self.probed or not job.rate > 0.0:
                continue
            if (
                job.done > 0.0
                and _rest_s(view, job) > _WORTH_S
                and _is_unknown(view.estimates, job, view.cluster.placement(held))
            ):
                self.probed.append(job.id)
                draft.assign(job, held, Probe(max(_FEWEST_STEPS, min(_MOST_STEPS, round(job.rate * _PROBE_S)))))


def _rest_s(view: Snapshot, job: Job) -> float:
    """Seconds until its end at its current rate."""
    return view.estimates.remaining(job, view.at).mean / job.rate if job.rate > 0.0 else inf


def _among(mix: Sequence[MixEntry], place: int, kind: Kind) -> tuple[JobSpec, Placement]:
    """A job of a mix, and its placement beside the others."""
    spec, fraction, batch_size = mix[place]
    others = tuple([Neighbour(*other) for other in (*mix[:place], *mix[place + 1 :])])
    return spec, Placement(((kind, 1),), fraction, batch_size, others)


def _name(mix: Iterable[MixEntry]) -> str:
    """A group by the names of its jobs and their shares."""
    return ", ".join(sorted(f"{spec.id} {share:g}" for spec, share, _ in mix))


def _is_unknown(estimates: Estimator, job: Job, placement: Placement) -> bool:
    """Whether its rate alone is a guess, with its share as well as on the whole device."""
    shares = (1.0, placement.fraction)
    rates = [estimates.rate(job.spec, Placement(placement.groups, s, placement.batch_size)) for s in shares]
    return all(rate.std >= _UNKNOWN * rate.mean for rate in rates)


def _groups(draft: Draft) -> Iterator[tuple[DeviceId, list[Job]]]:
    """Devices with several jobs of one device each, without those whose jobs must stay as they are."""
    pinned = draft.view.occupancy.pinned_devices
    for device in (each for each in draft.occupancy.shared_devices() if each not in pinned):
        jobs = [draft.view.jobs[resident.job] for resident in draft.occupancy.residents(device)]
        if len(jobs) > 1 and all((held := draft.holding(job)) and held.num_devices == 1 for job in jobs):
            yield device, sorted(jobs, key=lambda job: (job.seq, job.id))


def _mix(draft: Draft, jobs: list[Job]) -> list[MixEntry]:
    found = []
    for job in jobs:
        held = draft.holding(job)
        assert held is not None
        found.append((job.spec, held.shares[0].fraction, held.batch_size))
    return found


def explain_sharing(view: Snapshot, job: Job) -> str:
    """Such as ``keeps 0.62 of its speed alone (predicted), 0.58 measured`` for a job on a shared device; else empty."""
    held = job.desired
    if held is None or held.num_devices != 1 or not view.estimates.predicts_retention:
        return ""
    device = DeviceId(held.shares[0].devices.start)
    kind: Kind = view.cluster.kind_of(device)
    others = [view.jobs[r.job] for r in view.occupancy.residents(device) if r.job != job.id and r.job in view.jobs]
    predicted = view.estimates.predicted_retention(job.spec, view.placement(job, held)) if others else None
    if predicted is None:
        return ""
    kept = view.estimates.retention(kind, [_mix(Draft(view), [job, *others])])[0][0]
    words = f"keeps {predicted.mean:.2f} of its speed alone (predicted)"
    return f"{words}, {kept.mean:.2f} measured" if kept.std <= SETTLED * kept.mean else words
