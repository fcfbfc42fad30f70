"""What Pollux's agents know: of each job, the steps it has measured and the gradient noise it last reported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np

from carpool.core.errors import UnknownName
from carpool.core.estimates import Estimate
from carpool.core.messages import ProgressReported
from carpool.core.model import Job, JobId, JobSpec
from carpool.core.topology import Cluster, Placement
from carpool.predictors.goodput import BatchLimits, Sample, ThroughputModel, gain, tune


@dataclass(slots=True)
class _Agent:
    """One job's samples, and the model fitted to them when it was last needed."""

    noise: float
    samples: dict[tuple[int, int, int], Sample] = field(default_factory=dict)
    model: ThroughputModel | None = None  # None: there are samples it has not seen
    asked: object = None  # what `goodputs` was last asked, and
    answer: list[tuple[float, int]] = field(
        default_factory=list
    )  # what it said: plans ask far more often than jobs learn


class PolluxAgents:
    """Learns each job's step time and noise from its own reports; the first sample of each configuration counts.

    A job that has not reported yet is taken to speed up in proportion to its devices, at its smallest batch. How much
    work is left is not learned: it is what the spec declares. Device ids are looked up in `cluster`.
    """

    def __init__(self, cluster: Cluster, limits: Mapping[str, BatchLimits]) -> None:
        self.version = 0
        self._cluster = cluster
        self._limits = limits  # by model
        self._agents: dict[JobId, _Agent] = {}

    def rate(self, spec: JobSpec, placement: Placement) -> Estimate:
        """Progress in reference-batch steps per second; nothing is known before the first report."""
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
        """What the spec declares less what is done."""
        return Estimate(job.remaining_at(at))

    def learn(self, at: float, job: Job, report: ProgressReported) -> None:
        """Keep the noise, and the step if it is the first in that configuration."""
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
        """The best rate over the job's batch sizes, and the batch, for each number of devices on one node or several.

        A job without `batch_range` keeps the batch it asked for.
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
        """The batch sizes of a job's application."""
        found = self._limits.get(spec.model)
        if found is None:
            raise UnknownName("application", spec.model, self._limits, where=f"job {spec.id!r}")
        return found

    def _model(self, agent: _Agent) -> ThroughputModel:
        if agent.model is None:
            agent.model = ThroughputModel().fit(list(agent.samples.values()))
        return agent.model
