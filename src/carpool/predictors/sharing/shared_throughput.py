"""Throughput of trainings that share devices, for any shares and batch sizes: solo profile times interference.

The estimator that competitive sharing proposes ("a machine learning approach to estimate throughput based on a given
tasks' combination and the virtual resource allocation for each task"): rates alone come from profiles, interference
from measured groups, and every report of a running group adds a measurement.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from carpool.core.errors import UnknownName
from carpool.core.estimates import Estimate, Estimator, MixEntry, Use
from carpool.core.messages import ProgressReported
from carpool.core.model import Job, JobId, JobSpec, Kind
from carpool.core.topology import Placement
from carpool.predictors.sharing.colocation import Solo, interpolated
from carpool.predictors.sharing.interference import Interference, Member

_CHANGED = 0.05  # least relative difference of a new measurement


class Sharer(NamedTuple):
    """A job in a mix on one device: its spec, share and batch size (0: its own)."""

    spec: JobSpec
    fraction: float
    batch_size: int = 0


class _Seen(NamedTuple):
    """A job's last report: instant, setting, fraction kept, and whether the previous report agreed."""

    at: float
    sharer: Sharer
    kept: float
    is_steady: bool


class SharedThroughput(Estimator):
    """Rates in seconds of work alone per second: 1 is the job alone on a whole device at its own batch size.

    With m the batch size, m0 the job's own, T(m) its step time alone, s its share and φ = noise·m0 its noise scale:

        rate = [m/T(m)] / [m0/T(m0)] · (φ + m0)/(φ + m) · alone(s) · kept(group)

    A job on several devices scales linearly. Reports are grouped by device; `refit_every` new groups trigger a
    refit.
    """

    predicts_mixes = True
    predicts_goodput = True
    predicts_retention = True
    version = 0

    def __init__(
        self,
        profiles: Mapping[str, tuple[Solo, ...]],
        interference: Interference,
        *,
        noise: float = 8.0,
        refit_every: int = 10,
    ) -> None:
        self.interference = interference
        self._profiles = profiles
        self._noise = noise
        self._refit_every = refit_every
        self._solos: dict[tuple[str, int], Solo] = {}
        self._members: dict[tuple[str, int, float], Member] = {}
        self._kept: dict[tuple[Member, ...], list[Estimate]] = {}
        self._seen: dict[int, dict[JobId, _Seen]] = {}  # by device
        self._known: dict[tuple[Member, ...], tuple[float, ...]] = {}  # groups measured on running jobs
        self._fresh: list[tuple[Member, ...]] = []

    def rate(self, spec: JobSpec, placement: Placement) -> Estimate:
        own = Sharer(spec, placement.fraction, placement.batch_size)
        others = [Sharer(n.spec, n.fraction, n.batch_size) for n in placement.neighbours if n.turn == placement.turn]
        speed = self._speed(own) * placement.num_devices / spec.devices
        kept = self._keeps([[own, *others]])[0][0]
        return Estimate(speed * kept.mean, speed * kept.std)

    def mixed(self, kind: Kind, mixes: Sequence[Sequence[MixEntry]]) -> list[list[Estimate]]:
        found = []
        named = [[Sharer(*entry) for entry in mix] for mix in mixes]
        for mix, kept in zip(named, self._keeps(named), strict=True):
            speeds = [self._speed(sharer) for sharer in mix]
            found.append([Estimate(s * k.mean, s * k.std) for s, k in zip(speeds, kept, strict=True)])
        return found

    def remaining(self, job: Job, at: float) -> Estimate:
        return Estimate(job.remaining_at(at))

    def goodput(self, spec: JobSpec, kind: Kind, batch_size: int) -> Estimate:
        return Estimate(self._goodput(spec, batch_size))

    def use(self, spec: JobSpec, kind: Kind) -> Use:
        profile = self.profile(spec)
        return Use(min(1.0, profile.fill), min(1.0, profile.memory_bw))

    def memory(self, spec: JobSpec, batch_size: int = 0) -> int:
        return self.profile(spec, batch_size).memory_bytes

    def learn(self, at: float, job: Job, report: ProgressReported) -> None:
        held = job.observed
        if held is None or report.rate <= 0.0 or held.num_devices != 1 or job.spec.devices != 1:
            return
        share = held.shares[0]
        device = share.devices.start
        own = Sharer(job.spec, share.fraction, held.batch_size)
        beside = self._seen.setdefault(device, {})
        before = beside.get(job.id)
        kept = report.rate / self._speed(own)
        is_steady = before is not None and before.sharer == own and abs(kept / before.kept - 1.0) <= _CHANGED
        beside[job.id] = _Seen(at, own, kept, is_steady)
        if before is not None:  # a job that has not reported since is gone
            beside = self._seen[device] = {other: seen for other, seen in beside.items() if seen.at >= before.at}
        if len(beside) > 1 and all(seen.is_steady for seen in beside.values()):
            self._take(list(beside.values()))

    def _take(self, group: Sequence[_Seen]) -> None:
        pairs = sorted((self._member(seen.sharer), min(1.0, seen.kept)) for seen in group)
        members = tuple(member for member, _ in pairs)
        kept = tuple(value for _, value in pairs)
        believed = self._known.get(members) or tuple(answer.mean for answer in self._asked([members])[0])
        if all(abs(new - old) <= _CHANGED * old for new, old in zip(kept, believed, strict=True)):
            return
        self._known[members] = kept
        self._kept[members] = [Estimate(value) for value in kept]  # use the measurement at once
        self._fresh.append(members)
        self.version += 1
        if len(self._fresh) >= self._refit_every:
            self.interference.update(self._fresh, [self._known[group] for group in self._fresh])
            self._fresh.clear()
            self._kept = {group: [Estimate(value) for value in kept] for group, kept in self._known.items()}

    def profile(self, spec: JobSpec, batch_size: int = 0) -> Solo:
        """A job's profile at a batch size, by default its own."""
        key = (spec.model, batch_size or spec.batch_size)
        found = self._solos.get(key)
        if found is None:
            known = self._profiles.get(spec.model)
            if known is None:
                raise UnknownName("model", spec.model, self._profiles, where=f"job {spec.id!r}")
            found = self._solos[key] = interpolated(known, key[1] or known[0].batch_size)
        return found

    def _speed(self, sharer: Sharer) -> float:
        goodput = self._goodput(sharer.spec, sharer.batch_size)
        return goodput * self.profile(sharer.spec, sharer.batch_size).alone(sharer.fraction)

    def _goodput(self, spec: JobSpec, batch_size: int) -> float:
        own, now = self.profile(spec), self.profile(spec, batch_size)
        m0, m = own.batch_size, now.batch_size
        noise = self._noise * m0
        return (m / now.step_s) / (m0 / own.step_s) * (noise + m0) / (noise + m)

    def _member(self, sharer: Sharer) -> Member:
        spec, fraction, batch_size = sharer
        key = (spec.model, batch_size or spec.batch_size, fraction)
        found = self._members.get(key)
        if found is None:
            found = self._members[key] = self.profile(spec, batch_size).member(fraction)
        return found

    def _keeps(self, mixes: Sequence[Sequence[Sharer]]) -> list[list[Estimate]]:
        groups = [[self._member(sharer) for sharer in mix] for mix in mixes]
        keys = [tuple(sorted(group)) for group in groups]
        answers = []
        for group, key, kept in zip(groups, keys, self._asked(keys), strict=True):
            by_member = dict(zip(key, kept, strict=True))
            answers.append([by_member[member] for member in group])
        return answers

    def _asked(self, groups: Sequence[tuple[Member, ...]]) -> list[list[Estimate]]:
        """Cached answers for groups in ascending order; missing ones are predicted in one call."""
        missing = [group for group in dict.fromkeys(groups) if group not in self._kept]
        if missing:
            self._kept.update(zip(missing, self._predicted(missing), strict=True))
        return [self._kept[group] for group in groups]

    def _predicted(self, groups: Sequence[tuple[Member, ...]]) -> list[list[Estimate]]:
        if self.interference.num_groups:
            return self.interference.predict(groups)
        return [[_guess(group)] * len(group) for group in groups]


def _guess(group: Sequence[Member]) -> Estimate:
    """Before anything is learned: oversubscribed caps share the device evenly."""
    kept = 1.0 / max(1.0, sum(member.share for member in group))
    return Estimate(kept, kept * 0.5)
