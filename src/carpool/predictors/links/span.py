"""Synchronisation across nodes: predicted from gradient bytes and measured links, corrected by measured steps."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, sqrt

from carpool.core.estimates import Estimate
from carpool.core.model import JobId, JobSpec
from carpool.core.topology import Path, Placement

_OVERHEAD_S = 0.03  # spread of the time that a step waits apart from its transfers, before the first measurement
_JOB_SPREAD, _EXACT_SPREAD, _PATH_SPREAD = 0.2, 0.5, 0.1  # of log factors, before the first measurement
_NOISE = 0.25  # of one measured synchronisation, relative: reports are moving averages, and machines are busy
_DRIFT = 0.02  # of a log factor from one measurement to the next
_MOST = 3.0  # largest log of a factor


@dataclass(slots=True)
class _JobTraffic:
    """Overhead of a job's steps in seconds and the log of its factor, with their covariances."""

    overhead_s: float = 0.0
    log: float = 0.0
    overhead_var: float = _OVERHEAD_S**2
    covariance: float = 0.0
    variance: float = _JOB_SPREAD**2


@dataclass(slots=True)
class _PathFactor:
    """The log of the factor of a path, and how uncertain it is."""

    log: float = 0.0
    variance: float = _PATH_SPREAD**2


class SpanModel:
    """Seconds of synchronisation of jobs across nodes: an overhead, and a ring all-reduce over the slowest link.

        S = o_job + f_job · f_path · (2(n − 1)/n · bytes / speed + 2(n − 1) · latency)        on n devices

    An exact job broadcasts the gradients of each of its n devices instead. The factor of a job says how its traffic
    differs from that; the factor of a path says how close process groups come to the link's measured speed. All are
    learned from reported synchronisation by an extended Kalman filter, which divides a deviation by their uncertainty.
    """

    def __init__(self) -> None:
        self._bytes: dict[JobId, float] = {}
        self._jobs: dict[JobId, _JobTraffic] = {}
        self._paths: dict[Path, _PathFactor] = {}

    def loaded(self, job: JobId, gradient_bytes: float) -> None:
        """A training reported the bytes that each of its devices contributes to a step."""
        if gradient_bytes > 0.0:
            self._bytes[job] = gradient_bytes

    def forget(self, job: JobId) -> None:
        self._bytes.pop(job, None)
        self._jobs.pop(job, None)

    def sync_s(self, spec: JobSpec, placement: Placement) -> Estimate | None:
        """Seconds of synchronisation in a step; None: on one node, or bytes or links are unknown."""
        base_s = self._base_s(spec, placement)
        if base_s is None or placement.path is None:
            return None
        job, path = self._jobs.get(spec.id) or _new_job(spec), self._paths.get(placement.path) or _PathFactor()
        sent_s = base_s * exp(job.log + path.log)
        spread = job.overhead_var + 2.0 * sent_s * job.covariance + sent_s**2 * (job.variance + path.variance)
        mean = max(0.0, job.overhead_s) + sent_s
        return Estimate(mean, min(mean, sqrt(max(0.0, spread))))

    def learn(self, spec: JobSpec, placement: Placement, sync_s: float) -> None:
        """Learn from the measured synchronisation of a step."""
        base_s = self._base_s(spec, placement)
        if base_s is None or placement.path is None or sync_s <= 0.0:
            return
        job, path = (
            self._jobs.setdefault(spec.id, _new_job(spec)),
            self._paths.setdefault(placement.path, _PathFactor()),
        )
        job.variance += _DRIFT**2
        path.variance += _DRIFT**2
        sent_s = base_s * exp(job.log + path.log)
        left_s = sync_s - job.overhead_s - sent_s
        of_overhead = job.overhead_var + sent_s * job.covariance
        of_log = job.covariance + sent_s * job.variance
        whole = of_overhead + sent_s * of_log + sent_s**2 * path.variance + (_NOISE * sync_s) ** 2
        job.overhead_s += of_overhead / whole * left_s
        job.log = _limited(job.log + of_log / whole * left_s)
        job.overhead_var -= of_overhead**2 / whole
        job.covariance -= of_overhead * of_log / whole
        job.variance -= of_log**2 / whole
        gain = sent_s * path.variance / whole
        path.log = _limited(path.log + gain * left_s)
        path.variance *= 1.0 - gain * sent_s

    def _base_s(self, spec: JobSpec, placement: Placement) -> float | None:
        size, path = self._bytes.get(spec.id), placement.path
        if size is None or path is None:
            return None
        count = placement.num_devices
        if spec.exact:
            return count * (size / path.bytes_per_s + path.latency_s)
        return 2.0 * (count - 1) * (size / count / path.bytes_per_s + path.latency_s)


def _new_job(spec: JobSpec) -> _JobTraffic:
    return _JobTraffic(variance=(_EXACT_SPREAD if spec.exact else _JOB_SPREAD) ** 2)


def _limited(value: float) -> float:
    return max(-_MOST, min(_MOST, value))


def on_one_node(placement: Placement) -> Placement:
    """The same devices as if they were on one node."""
    counts: dict[str, int] = {}
    for kind, count in placement.groups:
        counts[kind] = counts.get(kind, 0) + count
    groups = tuple(sorted([(kind, counts[kind]) for kind in {kind for kind, _ in placement.groups}]))
    return Placement(
        groups, placement.fraction, placement.batch_size, placement.neighbours, placement.turn, placement.beside
    )
