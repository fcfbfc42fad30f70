"""Synchronisation across nodes: predicted from gradient bytes and measured links, corrected by measured steps."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, log, sqrt

from carpool.core.estimates import Estimate
from carpool.core.model import JobId, JobSpec
from carpool.core.topology import Path, Placement

_JOB_SPREAD, _PATH_SPREAD = 0.4, 0.2  # of log factors before the first measurement
_NOISE = 0.15  # of the log of one measured synchronisation
_DRIFT = 0.02  # of a log factor from one measurement to the next
_FELT = 0.25  # least part of a step that synchronisation must be predicted to take, to be learned from
_MOST = 3.0  # largest log of a ratio that counts


@dataclass(slots=True)
class _Factor:
    """A factor in logs, and how uncertain it is."""

    log: float
    variance: float


class SpanModel:
    """Seconds of synchronisation of jobs across nodes: ring all-reduce over the slowest link, times two factors.

        S = f_job · f_path · (2(n − 1)/n · bytes / speed + 2(n − 1) · latency)        on n devices

    An exact job broadcasts the gradients of each of its n devices instead. The factor of a job says how its traffic
    differs from that, the factor of a path what process groups reach on links of a measured speed. Both are learned
    from reported synchronisation; what one measurement tells is split by their uncertainty.
    """

    def __init__(self) -> None:
        self._bytes: dict[JobId, float] = {}
        self._jobs: dict[JobId, _Factor] = {}
        self._paths: dict[Path, _Factor] = {}

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
        job, path = self._factors(spec.id, placement.path)
        mean = base_s * exp(job.log + path.log)
        return Estimate(mean, mean * min(1.0, sqrt(job.variance + path.variance)))

    def learn(self, spec: JobSpec, placement: Placement, step_s: float, sync_s: float) -> None:
        """Take in the measured synchronisation of a step."""
        base_s, predicted = self._base_s(spec, placement), self.sync_s(spec, placement)
        if base_s is None or predicted is None or placement.path is None or sync_s <= 0.0:
            return
        if max(base_s, predicted.mean) < _FELT * step_s:
            return  # the rest of the step hides it
        job, path = self._factors(spec.id, placement.path)
        self._jobs[spec.id], self._paths[placement.path] = job, path
        left = max(-_MOST, min(_MOST, log(sync_s / predicted.mean)))
        for factor in (job, path):
            factor.variance += _DRIFT**2
        whole = job.variance + path.variance + _NOISE**2
        for factor in (job, path):
            gain = factor.variance / whole
            factor.log += gain * left
            factor.variance *= 1.0 - gain

    def _factors(self, job: JobId, path: Path) -> tuple[_Factor, _Factor]:
        known = self._jobs.get(job), self._paths.get(path)
        return known[0] or _Factor(0.0, _JOB_SPREAD**2), known[1] or _Factor(0.0, _PATH_SPREAD**2)

    def _base_s(self, spec: JobSpec, placement: Placement) -> float | None:
        size, path = self._bytes.get(spec.id), placement.path
        if size is None or path is None:
            return None
        count = placement.num_devices
        if spec.exact:
            return count * (size / path.bytes_per_s + path.latency_s)
        return 2.0 * (count - 1) * (size / count / path.bytes_per_s + path.latency_s)


def on_one_node(placement: Placement) -> Placement:
    """The same devices as if they were on one node."""
    counts: dict[str, int] = {}
    for kind, count in placement.groups:
        counts[kind] = counts.get(kind, 0) + count
    groups = tuple(sorted([(kind, counts[kind]) for kind in {kind for kind, _ in placement.groups}]))
    return Placement(
        groups, placement.fraction, placement.batch_size, placement.neighbours, placement.turn, placement.beside
    )
