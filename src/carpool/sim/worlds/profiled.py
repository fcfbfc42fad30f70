"""World from profiles: rates and memory as ``carpool profile`` measured them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from carpool.core.errors import InputError, UnknownName
from carpool.core.estimates import Estimate, Estimator
from carpool.core.messages import ProgressReported
from carpool.core.model import Job, JobSpec, Kind
from carpool.core.topology import Cluster, Placement
from carpool.predictors.profiles.profile import read_profile
from carpool.predictors.profiles.rate_model import ProfileRateModel
from carpool.sim.traces.trace import Arrival
from carpool.sim.worlds.base import Pace, TrainingSignals, World


@dataclass(frozen=True, slots=True)
class ProfileWorld(World):
    """Work is counted in seconds alone on the devices asked for, of the first kind that a job's profile knows.

    A trace names a model by its entry (``digits.py:mlp``) or by the function alone (``mlp``); a trace without models
    means the only profile there is. Starts, moves and ends cost what the profile has seen them cost.
    """

    profiles: Mapping[str, ProfileRateModel]  # by entry, and by function where that is unambiguous

    @classmethod
    def load(cls, path: Path) -> ProfileWorld:
        """From one file, or from every profile in a folder."""
        files = sorted(path.glob("*.json")) if path.is_dir() else [path]
        if not files:
            raise InputError("holds no profiles", where=str(path), way_out="Make one with carpool profile.")
        read = [ProfileRateModel.of(read_profile(file)) for file in files]
        functions = [belief.profile.entry.rpartition(":")[2] for belief in read]
        known = {belief.profile.entry: belief for belief in read}
        short = zip(functions, read, strict=True)
        return cls({**{name: belief for name, belief in short if functions.count(name) == 1}, **known})

    def prepare(self, arrivals: Sequence[Arrival], cluster: Cluster) -> tuple[Sequence[Arrival], Cluster]:
        """Jobs with their lengths and memory filled in; every model on every kind must have been measured."""
        for _, spec in arrivals:
            known = self.of(spec).kinds
            for kind in spec.kinds or cluster.kinds:
                if kind not in known:
                    raise UnknownName("device kind", kind, known, where=f"the profile of {spec.model or 'the model'}")
        return [Arrival(at, self._filled(spec)) for at, spec in arrivals], cluster

    def pace(self, spec: JobSpec, done: float, placement: Placement) -> Pace:
        """As the profile says."""
        return Pace(self.rate(spec, placement).mean)

    def change_s(self, spec: JobSpec, before: Placement | None, after: Placement) -> float:
        """What a start or a move was seen to cost; nothing where it was never seen."""
        costs = self.of(spec).profile.costs
        return (costs.start_s if before is None else costs.resize_s) or 0.0

    def signals(self, spec: JobSpec, done: float, placement: Placement) -> TrainingSignals:
        """The noise scale, where it was measured."""
        noise = self.of(spec).profile.noise
        return TrainingSignals(noise=None if noise is None else noise.scale)

    def estimator(self) -> Estimator:
        """What the profiles say, with how unsure they are."""
        return ProfileEstimator(self)

    # ---------------------------------------------------------------------------------------------------- formulas
    def of(self, spec: JobSpec) -> ProfileRateModel:
        """The profile of a job's model."""
        if not spec.model and len({id(belief) for belief in self.profiles.values()}) == 1:
            return next(iter(self.profiles.values()))
        found = self.profiles.get(spec.model)
        if found is None:
            raise UnknownName("model", spec.model, self.profiles, where=f"job {spec.id!r}")
        return found

    def rate(self, spec: JobSpec, placement: Placement) -> Estimate:
        """Steps per second there over those on the reference devices."""
        believed = self.of(spec).rate(placement, spec.batch_size)
        assert believed is not None, "`prepare` refuses clusters with other kinds"
        reference = self._reference(spec)
        return Estimate(believed.rate.mean / reference, believed.rate.std / reference)

    def _reference(self, spec: JobSpec) -> float:
        belief = self.of(spec)
        alone = belief.rate(Placement(((Kind(belief.kinds[0]), spec.devices),)), spec.batch_size)
        assert alone is not None, "a kind of the profile is known to it"
        return alone.rate.mean

    def _filled(self, spec: JobSpec) -> JobSpec:
        profile = self.of(spec).profile
        steps = profile.total_steps(spec.batch_size)
        if spec.work is None and steps is None:
            raise InputError(
                f"job {spec.id!r} has no length, and only a target ends its training",
                way_out="Give the trace a column work_s.",
            )
        if spec.work is None and steps is not None:
            spec = replace(spec, work=steps / self._reference(spec) + (profile.end_s or 0.0))
        return spec if spec.memory_bytes else replace(spec, memory_bytes=self.of(spec).memory(spec))


class ProfileEstimator(Estimator):
    """Believes the profiles; they do not change while a simulation runs."""

    version = 0

    def __init__(self, world: ProfileWorld) -> None:
        self._world = world

    def rate(self, spec: JobSpec, placement: Placement) -> Estimate:
        """As the profile says."""
        return self._world.rate(spec, placement)

    def remaining(self, job: Job, at: float) -> Estimate:
        """The job's length less what is done."""
        return Estimate(job.remaining_at(at))

    def learn(self, at: float, job: Job, report: ProgressReported) -> None:
        """Nothing to learn."""
