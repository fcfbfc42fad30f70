"""Beliefs about jobs that run for the first time: measured rates where there are some, honest guesses where not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

from carpool.core.estimates import Estimate
from carpool.core.messages import ProgressReported
from carpool.core.model import Job, JobId, JobSpec, Kind
from carpool.core.topology import Cluster, Placement

_LATEST = 0.4  # weight of the newest measurement
_SERIAL = 0.1  # part of a step that more devices do not shorten, until measured: rate(n) = n / (1 + 0.1·(n − 1))
_TYPICAL_S = 120.0  # length of a job of which nothing is known, while nothing is known of any other
_UNSURE = 0.5  # spread of a guess, relative to it

_Key = tuple[JobId, tuple[tuple[Kind, int], ...], float, int]


@dataclass(slots=True)
class _Measured:
    mean: float
    spread: float = 0.0
    count: int = 1


class Live:
    """An estimator that learns only from what running jobs report.

    A rate is the moving average of what was reported under the same devices, share and batch. Elsewhere it is scaled
    from the nearest measurement of that job by the number of devices (Amdahl, a tenth serial), their speeds (`speeds`:
    cores of a device, say) and the share. Of a job that never ran it is known only how it compares with itself: its
    rate is 1 on the reference, and its length that of the average known job.
    """

    def __init__(self, cluster: Cluster, speeds: Mapping[Kind, float] | None = None) -> None:
        self.version = 0
        self.cluster = cluster  # grows with the scheduler's
        self._speeds = dict(speeds or {})
        self._rates: dict[_Key, _Measured] = {}
        self._of_job: dict[JobId, list[_Key]] = {}
        self._totals: dict[JobId, float] = {}

    def expect(self, job: JobId, total: float) -> None:
        """The job's whole length has become known."""
        if self._totals.get(job) != total:
            self._totals[job] = total
            self.version += 1

    def total(self, job: JobId) -> float | None:
        """The job's whole length, where it is known."""
        return self._totals.get(job)

    def rate(self, spec: JobSpec, placement: Placement) -> Estimate:
        """Steps per second there."""
        key = _key(spec.id, placement)
        known = self._rates.get(key)
        if known is not None:
            return Estimate(known.mean, known.spread)
        near = self._nearest(spec.id, placement)
        if near is None:
            guess = self._prior(placement.groups, placement.fraction)
            return Estimate(guess, guess * _UNSURE)
        _, groups, fraction, _ = near
        guess = (
            self._rates[near].mean * self._prior(placement.groups, placement.fraction) / self._prior(groups, fraction)
        )
        return Estimate(guess, guess * _UNSURE)

    def remaining(self, job: Job, at: float) -> Estimate:
        """Steps still to do."""
        spec = job.spec
        total = spec.work if spec.work is not None else self._totals.get(spec.id)
        if total is not None:
            return Estimate(max(0.0, total - job.done_at(at)))
        typical = self._typical_s() * self._alone(spec.id)
        return Estimate(typical, typical)

    def learn(self, at: float, job: Job, report: ProgressReported) -> None:
        """Take one measured rate in."""
        if job.observed is None or not 0.0 < report.rate < inf:
            return
        if max(job.observed.devices()) >= self.cluster.num_devices:
            return  # while a journal is folded, of a machine that came back with other devices
        key = _key(job.id, self.cluster.placement(job.observed))
        known = self._rates.get(key)
        if known is None:
            self._rates[key] = _Measured(report.rate, report.rate * _UNSURE)
            self._of_job.setdefault(job.id, []).append(key)
        else:
            known.spread += _LATEST * (abs(report.rate - known.mean) - known.spread)
            known.mean += _LATEST * (report.rate - known.mean)
            known.count += 1
        self.version += 1

    # ------------------------------------------------------------------------------------------------------- guesses
    def _prior(self, groups: tuple[tuple[Kind, int], ...], fraction: float) -> float:
        """How fast a job is there, relative to one device of speed 1."""
        count = sum(number for _, number in groups)
        speed = sum(number * self._speeds.get(kind, 1.0) for kind, number in groups) / count
        return speed * fraction * count / (1.0 + _SERIAL * (count - 1))

    def _nearest(self, job: JobId, placement: Placement) -> _Key | None:
        """The measurement whose prior is closest to the one asked for; the newest of equals."""
        wanted = self._prior(placement.groups, placement.fraction)
        keys = reversed(self._of_job.get(job, []))
        return min(keys, key=lambda key: abs(self._prior(key[1], key[2]) - wanted), default=None)

    def _alone(self, job: JobId) -> float:
        """The job's rate on one device of speed 1, as far as is known."""
        keys = self._of_job.get(job)
        if not keys:
            return 1.0
        _, groups, fraction, _ = keys[-1]
        return self._rates[keys[-1]].mean / self._prior(groups, fraction)

    def _typical_s(self) -> float:
        """Mean length alone, over the jobs of which it is known."""
        lengths = [total / self._alone(job) for job, total in self._totals.items() if job in self._of_job]
        return sum(lengths) / len(lengths) if lengths else _TYPICAL_S


def _key(job: JobId, placement: Placement) -> _Key:
    return job, placement.groups, placement.fraction, placement.batch_size
