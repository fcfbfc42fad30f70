"""World of trainings that stop at a target loss: noisy loss curves, measured speeds by device count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from carpool.core.errors import CarpoolError, InputError, UnknownName
from carpool.core.estimates import Estimate, Estimator
from carpool.core.messages import ProgressReported
from carpool.core.model import Job, JobId, JobSpec
from carpool.core.topology import Cluster, Placement
from carpool.predictors.loss.curve import LossCurves, LossTarget
from carpool.sim.traces.trace import Arrival
from carpool.sim.worlds.base import SteadyWorld, TrainingSignals

_LONGEST = 1 << 20  # steps after which a training that has not reached its target never will


@dataclass(frozen=True, slots=True)
class LossModel:
    """A model and its data: l(k) = 1/(b0·k + b1) + floor, with noise in every step."""

    b0: float
    b1: float
    floor: float
    target: float
    noise: float = 0.0  # standard deviation of one step's loss, relative to the loss
    behind: float = 0.0  # steps of pre-training
    window: int = 10
    steps_per_s: float = 10.0  # at speed 1
    speeds: tuple[float, ...] = (1.0,)  # on 1, 2, … devices

    def curve(self, steps: NDArray[np.float64]) -> NDArray[np.float64]:
        """The loss without noise after `steps` steps."""
        return np.asarray(1.0 / (self.b0 * (steps + self.behind) + self.b1) + self.floor)


@dataclass(slots=True)
class LossWorld(SteadyWorld):
    """Work is steps of the whole batch; a job ends when its window's mean loss first reaches the target.

    `LossModel.speeds` are in progress, not in steps, for batches that are constant per device. Devices are shared
    by fraction, all device types are alike, and crashes lose nothing.
    """

    learners: Mapping[str, LossModel]  # by model
    seed: int = 0
    start_s: float = 0.0
    resize_s: float = 0.0
    report_every_s: float = 1.0
    knows_lengths: bool = False  # whether the estimator knows how many steps are left
    _histories: dict[JobId, NDArray[np.float64]] = field(default_factory=dict, repr=False)

    def prepare(self, arrivals: Sequence[Arrival], cluster: Cluster) -> tuple[Sequence[Arrival], Cluster]:
        return [Arrival(at, self._elastic(spec)) for at, spec in arrivals], cluster

    def work(self, spec: JobSpec) -> float:
        return float(len(self._history(spec)))

    def signals(self, spec: JobSpec, done: float, placement: Placement) -> TrainingSignals:
        history = self._history(spec)
        return TrainingSignals(float(history[min(max(int(done) - 1, 0), len(history) - 1)]))

    def estimator(self) -> Estimator:
        return LossEstimator(self)

    def learner(self, spec: JobSpec) -> LossModel:
        found = self.learners.get(spec.model)
        if found is None:
            raise UnknownName("model", spec.model, self.learners, where=f"job {spec.id!r}")
        return found

    def rate(self, spec: JobSpec, placement: Placement) -> float:
        """Steps per second there; devices beyond the table are idle."""
        learner = self.learner(spec)
        speed = learner.speeds[min(placement.num_devices, len(learner.speeds)) - 1]
        return learner.steps_per_s * speed * placement.fraction / max(1.0, placement.load)

    def _history(self, spec: JobSpec) -> NDArray[np.float64]:
        """The loss of every step of a job, drawn once."""
        if spec.id not in self._histories:
            self._histories[spec.id] = _drawn(self.learner(spec), spec.id, self.seed)
        return self._histories[spec.id]

    def _elastic(self, spec: JobSpec) -> JobSpec:
        widest = max(spec.widest, len(self.learner(spec).speeds))
        return replace(spec, work=None, min_devices=1, max_devices=widest)


class LossEstimator(Estimator):
    """True rates; remaining steps from loss curves, before those the average of known lengths."""

    follows_losses = True

    def __init__(self, world: LossWorld) -> None:
        self._world = world
        self.curves = LossCurves()

    @property
    def version(self) -> int:
        return self.curves.version

    def rate(self, spec: JobSpec, placement: Placement) -> Estimate:
        return Estimate(self._world.rate(spec, placement))

    def remaining(self, job: Job, at: float) -> Estimate:
        """Steps to the target by the job's curve; without one, as long as other jobs on average."""
        done = job.done_at(at)
        if self._world.knows_lengths:
            return Estimate(max(0.0, self._world.work(job.spec) - done))
        known = self.curves.remaining(job.id, done)
        if known is not None:
            return known
        totals = self.curves.totals() or [self._world.learner(job.spec).steps_per_s * 300.0]
        guess = max(0.0, float(np.mean(totals)) - done)
        return Estimate(guess, guess)

    def learn(self, at: float, job: Job, report: ProgressReported) -> None:
        learner = self._world.learner(job.spec)
        self.curves.aim(job.id, LossTarget(learner.target, learner.window))
        self.curves.learn(job.id, report.done, report.loss)

    def learning(self, job: JobId, steps: float) -> tuple[float, float] | None:
        return self.curves.learning(job, steps)


def _drawn(learner: LossModel, job: JobId, seed: int) -> NDArray[np.float64]:
    if learner.target <= learner.floor:
        raise InputError(
            f"job {job!r} has target loss {learner.target:g} and floor {learner.floor:g}",
            way_out="Give a target above the floor.",
        )
    random = np.random.default_rng([seed, crc32(job.encode())])
    size = 4096
    losses = np.empty(0)
    while size <= _LONGEST:
        more = learner.curve(np.arange(len(losses) + 1.0, size + 1.0))
        losses = np.concatenate([losses, more * (1.0 + learner.noise * random.standard_normal(len(more)))])
        means = np.convolve(losses, np.full(learner.window, 1.0 / learner.window), "valid")
        reached = np.flatnonzero(means <= learner.target)
        if len(reached):
            return losses[: int(reached[0]) + learner.window]
        size *= 2
    raise CarpoolError(f"job {job!r} does not reach loss {learner.target:g} in {_LONGEST} steps")
