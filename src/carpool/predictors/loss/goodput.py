"""Goodput model of data-parallel training (Pollux), and the per-job agents that fit it to reports.

Qiao et al., "Pollux: Co-adaptive Cluster Scheduling for Goodput-Optimized Deep Learning", OSDI 2021.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, inf, log, sqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, minimize

from carpool.core.errors import UnknownName
from carpool.core.estimates import Estimate, Estimator
from carpool.core.messages import ProgressReported
from carpool.core.model import Job, JobId, JobSpec
from carpool.core.topology import Cluster, Placement

Floats = NDArray[np.float64]

_TINY = 1e-8
_START = (1e-1, 1e-2, 1e-1, 1e-2, 1e-1, 1e-2, 1.001)
_KEEP_GAMMA, _KEEP_SLOPES = 1e-3, 1e-2  # regularization where there is little data
_POINTS = 50  # batch sizes tried, evenly spaced in their logarithm


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """The batch sizes of an application, of a whole step and of one pass on one device."""

    reference: int  # smallest batch size, in which progress is counted
    largest: int
    micro_min: int = 1
    micro_max: int = 1 << 30  # what fits into memory

    def cut(self, batch: int, count: int) -> tuple[int, int]:
        """Samples of one pass on each of `count` devices, and the number of passes before the synchronizing one.

        On one device a batch above the reference takes at least two passes, since the gradient noise is
        measured by comparing parts of the batch.
        """
        local = ceil(batch / count - _TINY)
        extra = ceil(local / self.micro_max - _TINY) - 1
        if count == 1 and batch > self.reference:
            extra = max(1, extra)
        micro = ceil(local / (extra + 1) - _TINY)
        return max(1, min(micro, self.largest // (count * (extra + 1)))), extra


class Sample(NamedTuple):
    """A measured step: nodes, devices, micro-batch, and the seconds of one pass."""

    nodes: int
    devices: int
    micro: int
    step_s: float  # computing and synchronising
    sync_s: float


@dataclass(slots=True, eq=False)
class ThroughputModel:
    """Step time by placement and micro-batch b on n devices.

        T_grad = α + β·b

        T_sync = 0 on one device, α_l + β_l·(n − 2) on one node, α_m + β_m·(n − 2) over several

        T      = (T_grad^γ + T_sync^γ)^(1/γ),  1 ≤ γ ≤ 10;  each further pass adds T_grad

    Fitted by the sum of the root mean squared errors of log T_grad and log T. Unobserved terms are assumed to be 0, so
    that policies try such placements; the network is at least a tenth slower than a node.
    """

    params_: Floats = field(default_factory=lambda: np.array(_START))  # α, β, α_m, β_m, α_l, β_l, γ

    def fit(self, samples: Sequence[Sample]) -> ThroughputModel:
        table = np.array(samples, dtype=np.float64)
        nodes, counts, micro, step_s = table[:, 0], table[:, 1], table[:, 2], table[:, 3]
        compute_s = np.maximum(step_s - table[:, 4], _TINY)
        low, high = np.array([_TINY] * 6 + [1.0]), np.array([inf] * 6 + [10.0])
        start = np.array(_START)
        several, alone = nodes > 1, (nodes == 1) & (counts > 1)
        for place, value in _known_beforehand(several, alone, counts, micro, compute_s).items():
            start[place] = low[place] = high[place] = value
        errors = _Errors(several, alone, np.maximum(counts - 2, _TINY), micro, np.log(compute_s), np.log(step_s))
        is_free = (low < high).astype(np.float64)
        start = np.clip(start, low, high)
        found = minimize(errors, start, (is_free,), method="L-BFGS-B", jac=True, bounds=Bounds(low, high))
        self.params_ = np.array(found.x)
        if not several.any():
            self.params_[2:4] = np.maximum(self.params_[2:4], 1.1 * self.params_[4:6])
        return self

    def step_s(self, several: NDArray[np.bool_], counts: Floats, micro: Floats, extra: Floats) -> Floats:
        """Seconds of whole steps with `extra` passes before the synchronizing one."""
        alpha, beta, alpha_m, beta_m, alpha_l, beta_l, gamma = self.params_
        more = np.maximum(counts - 2, _TINY)
        local = np.where(counts > 1, alpha_l + beta_l * more, _TINY)
        sync = np.where(several, alpha_m + beta_m * more, local)
        grad = alpha + beta * micro
        longer = np.maximum(grad, sync)
        shorter = np.minimum(grad, sync)
        return np.asarray(longer * (1.0 + (shorter / longer) ** gamma) ** (1.0 / gamma) + extra * grad)


def _known_beforehand(
    several: NDArray[np.bool_], alone: NDArray[np.bool_], counts: Floats, micro: Floats, compute_s: Floats
) -> dict[int, float]:
    """Parameters that the samples do not determine, and their assumed values."""
    fixed: dict[int, float] = {}
    if np.ptp(micro) == 0.0:
        fixed[0] = float(compute_s.mean()) / 2.0
    if not several.any():
        fixed[2] = fixed[3] = _TINY
    if not alone.any():
        fixed[4] = fixed[5] = _TINY
    if not (counts > 2).any():
        fixed[3] = fixed[5] = _TINY
    return fixed


class _Errors:
    """The objective of the fit and its gradient."""

    __slots__ = ("_alone", "_compute", "_micro", "_more", "_several", "_step")

    def __init__(
        self,
        several: NDArray[np.bool_],
        alone: NDArray[np.bool_],
        more: Floats,
        micro: Floats,
        compute: Floats,
        step: Floats,
    ) -> None:
        self._several = several.astype(np.float64)
        self._alone = alone.astype(np.float64)
        self._more = more
        self._micro = micro
        self._compute = compute  # logarithms of seconds
        self._step = step

    def __call__(self, params: Floats, is_free: Floats) -> tuple[float, Floats]:
        alpha, beta, alpha_m, beta_m, alpha_l, beta_l, gamma = map(float, params)
        several, alone, more, micro = self._several, self._alone, self._more, self._micro
        grad_s = alpha + beta * micro
        sync_s = several * (alpha_m + beta_m * more) + alone * (alpha_l + beta_l * more) + _TINY
        log_grad, log_sync = np.log(grad_s), np.log(sync_s)
        apart = gamma * (log_sync - log_grad)
        of_grad = 1.0 / (1.0 + np.exp(np.minimum(apart, 700.0)))  # share of T_grad in the derivative of log T
        log_step = np.maximum(log_grad, log_sync) + np.log1p(np.exp(-np.abs(apart))) / gamma
        error, slope = _rms(log_grad - self._compute)
        error_step, slope_step = _rms(log_step - self._step)
        kept = (beta_m / alpha_m) ** 2 + (beta_l / alpha_l) ** 2
        value = error + error_step + _KEEP_GAMMA * (gamma - 1.0) ** 2 + _KEEP_SLOPES * kept
        by_grad = (slope + slope_step * of_grad) / grad_s
        by_sync = slope_step * (1.0 - of_grad) / sync_s
        mixed = of_grad * log_grad + (1.0 - of_grad) * log_sync
        slopes = [
            by_grad.sum(),
            by_grad.dot(micro),
            by_sync.dot(several) - 2.0 * _KEEP_SLOPES * beta_m**2 / alpha_m**3,
            (by_sync * several).dot(more) + 2.0 * _KEEP_SLOPES * beta_m / alpha_m**2,
            by_sync.dot(alone) - 2.0 * _KEEP_SLOPES * beta_l**2 / alpha_l**3,
            (by_sync * alone).dot(more) + 2.0 * _KEEP_SLOPES * beta_l / alpha_l**2,
            (slope_step * (mixed - log_step)).sum() / gamma + 2.0 * _KEEP_GAMMA * (gamma - 1.0),
        ]
        return value, np.array(slopes) * is_free


def _rms(errors: Floats) -> tuple[float, Floats]:
    """Root mean square and its derivative by each error."""
    size = len(errors)
    rms = sqrt(float(errors.dot(errors)) / size)
    return rms, errors / (size * rms) if rms > 1e-12 else np.zeros(size)


def gain(batch: Floats, reference: float, noise: float) -> Floats:
    """Progress of one step in steps of the reference batch, with gradient noise scale φ: (b/m0)·(φ + m0)/(φ + b)."""
    return batch / reference * ((noise + reference) / (noise + batch))


class Tuning(NamedTuple):
    """The best batch size for each placement, and the progress per second with it; 0 if impossible."""

    rates: Floats
    batches: NDArray[np.int64]


def tune(
    model: ThroughputModel,
    noise: float,
    limits: BatchLimits,
    batches: tuple[int, int],
    several: Sequence[bool],
    counts: Sequence[int],
) -> Tuning:
    """Maximize goodput over batch sizes from `batches`, for each placement of `counts` devices."""
    spans, devices = np.asarray(several, dtype=np.bool_), np.asarray(counts, dtype=np.float64)
    least = np.maximum(float(batches[0]), limits.micro_min * devices)
    portion = np.linspace(0.0, 1.0, _POINTS if batches[0] < batches[1] else 1)[:, None]
    local = np.exp(np.log(least) * (1.0 - portion) + log(batches[1]) * portion) / devices
    extra = np.ceil(local / limits.micro_max - _TINY) - 1.0
    extra = np.where((devices == 1) & (local > limits.reference + _TINY), np.maximum(extra, 1.0), extra)
    micro = np.ceil(local / (extra + 1.0) - _TINY)
    batch = devices * micro * (extra + 1.0)
    rates = gain(batch, limits.reference, noise) / model.step_s(spans, devices, micro, extra)
    can_run = (micro >= limits.micro_min) & (micro <= limits.micro_max) & (least <= batches[1])
    rates = np.where(can_run, rates, 0.0)
    best = rates.argmax(axis=0)
    columns = np.arange(len(devices))
    return Tuning(rates[best, columns], np.minimum(batch[best, columns], batches[1]).astype(np.int64))


@dataclass(slots=True)
class _Agent:
    """One job's samples, and the model fitted to them on demand."""

    noise: float
    samples: dict[tuple[int, int, int], Sample] = field(default_factory=dict)
    model: ThroughputModel | None = None  # None: samples have changed
    asked: object = None  # the arguments of the last call of `goodputs`
    # Its result: plans ask far more often than a new report changes the answer.
    answer: list[tuple[float, int]] = field(default_factory=list)


class PolluxAgents(Estimator):
    """Learns each job's step time and noise from its own reports; the first sample of each configuration counts.

    A job that has not reported is assumed to scale linearly, at its smallest batch size. Remaining work is what the
    spec declares.
    """

    tunes_batches = True
    version = 0

    def __init__(self, cluster: Cluster, limits: Mapping[str, BatchLimits]) -> None:
        self._cluster = cluster
        self._limits = limits  # by model
        self._agents: dict[JobId, _Agent] = {}

    def rate(self, spec: JobSpec, placement: Placement) -> Estimate:
        """Progress in reference-batch steps per second; unknown before the first report."""
        agent = self._agents.get(spec.id)
        if agent is None:
            return Estimate(0.0, inf)
        limits, count = self.limits(spec), placement.num_devices
        micro, extra = limits.cut(placement.batch_size or spec.batch_size or limits.reference, count)
        several = np.array([len(placement.groups) > 1])
        arrays = [np.array([float(number)]) for number in (count, micro, extra)]
        step_s = self._model(agent).step_s(several, *arrays)
        batch = np.array([float(count * micro * (extra + 1))])
        return Estimate(float(gain(batch, limits.reference, agent.noise)[0] / step_s[0]) * placement.fraction)

    def remaining(self, job: Job, at: float) -> Estimate:
        return Estimate(job.remaining_at(at))

    def learn(self, at: float, job: Job, report: ProgressReported) -> None:
        held = job.observed
        if report.noise is None or report.step_s is None or held is None:
            return
        agent = self._agents.get(job.id)
        if agent is None:
            agent = self._agents[job.id] = _Agent(report.noise)
            self.version += 1
        elif agent.noise != report.noise:
            agent.noise = report.noise
            self.version += 1
        placement = self._cluster.placement(held)
        limits, count = self.limits(job.spec), placement.num_devices
        micro, extra = limits.cut(held.batch_size or job.spec.batch_size or limits.reference, count)
        key = (len(placement.groups), count, micro)
        if key not in agent.samples:
            sync_s = report.sync_s or 0.0
            compute_s = (report.step_s - sync_s) / (extra + 1)
            agent.samples[key] = Sample(*key, compute_s + sync_s, sync_s)
            agent.model = None
            self.version += 1

    def goodputs(self, spec: JobSpec, counts: Sequence[int], several: Sequence[bool]) -> Sequence[tuple[float, int]]:
        """The best rate over the job's batch sizes, and the batch size, per number of devices on one node or several.

        A job without `batch_range` keeps its batch size.
        """
        limits = self.limits(spec)
        own = spec.batch_size or limits.reference
        batches = spec.batch_range or (own, own)
        agent = self._agents.get(spec.id)
        if agent is None:
            return [(float(count), min(max(batches[0], limits.micro_min * count), batches[1])) for count in counts]
        model = self._model(agent)
        asked = (model, agent.noise, batches, tuple(counts), tuple(several))
        if agent.asked != asked:
            rates, best = tune(model, agent.noise, limits, batches, several, counts)
            agent.asked, agent.answer = asked, list(zip(rates.tolist(), best.tolist(), strict=True))
        return agent.answer

    def limits(self, spec: JobSpec) -> BatchLimits:
        found = self._limits.get(spec.model)
        if found is None:
            raise UnknownName("application", spec.model, self._limits, where=f"job {spec.id!r}")
        return found

    def _model(self, agent: _Agent) -> ThroughputModel:
        if agent.model is None:
            agent.model = ThroughputModel().fit(list(agent.samples.values()))
        return agent.model
