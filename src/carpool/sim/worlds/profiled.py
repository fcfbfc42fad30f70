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
    """Work is seconds alone on the requested devices, of the first device type in a job's profile.

    A trace names a model by its entry (``digits.py:mlp``) or by the function alone (``mlp``); a trace without
    models means the only profile. Starts, moves and ends cost what the profile measured.
    """

    profiles: Mapping[str, ProfileRateModel]  # by entry, and by function where that is unambiguous

    @classmethod
    def load(cls, path: Path) -> ProfileWorld:
        files = sorted(path.glob("*.json")) if path.is_dir() else [path]
        if not files:
            raise InputError("holds no profiles", where=str(path), way_out="Make one with carpool profile.")
        read = [ProfileRateModel.of(read_profile(file)) for file in files]
        functions = [belief.profile.entry.rpartition(":")[2] for belief in read]
        known = {belief.profile.entry: belief for belief in read}
        short = zip(functions, read, strict=True)
        return cls({**{name: belief for name, belief in short if functions.count(name) == 1}, **known})

    def prepare(self, arrivals: Sequence[Arrival], cluster: Cluster) -> tuple[Sequence[Arrival], Cluster]:
        for _, spec in arrivals:
            known = self.of(spec).kinds
            for kind in spec.kinds or cluster.kinds:
                if kind not in known:
                    raise UnknownName("device type", kind, known, where=f"the profile of {spec.model or 'the model'}")
        return [Arrival(at, self._filled(spec)) for at, spec in arrivals], cluster

    def pace(self, spec: JobSpec, done: float, placement: Placement) -> Pace:
        return Pace(self.rate(spec, placement).mean)

    def change_s(self, spec: JobSpec, before: Placement | None, after: Placement) -> float:
        """The measured cost of a start or a move; 0 if unknown."""
        costs = self.of(spec).profile.costs
        return (costs.start_s if before is None else costs.resize_s) or 0.0

    def signals(self, spec: JobSpec, done: float, placement: Placement) -> TrainingSignals:
        noise = self.of(spec).profile.noise
        return TrainingSignals(noise=None if noise is None else noise.scale)

    def estimator(self) -> Estimator:
        return ProfileEstimator(self)

    def of(self, spec: JobSpec) -> ProfileRateModel:
        if not spec.model and len({id(belief) for belief in self.profiles.values()}) == 1:
            return next(iter(self.profiles.values()))
        found = self.profiles.get(spec.model)
        if found is None:
            raise UnknownName("model", spec.model, self.profiles, where=f"job {spec.id!r}")
        return found

    def rate(self, spec: JobSpec, placement: Placement) -> Estimate:
        """Steps per second there, over those on the reference devices."""
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
                f"job {spec.id!r} has no length: its training ends at a target",
                way_out="Add a column work_s to the trace.",
            )
        if spec.work is None and steps is not None:
            spec = replace(spec, work=steps / self._reference(spec) + (profile.end_s or 0.0))
        return spec if spec.memory_bytes else replace(spec, memory_bytes=self.of(spec).memory(spec))


class ProfileEstimator(Estimator):
    """Predicts from profiles, which do not change during a simulation."""

    version = 0

    def __init__(self, world: ProfileWorld) -> None:
        self._world = world

    def rate(self, spec: JobSpec, placement: Placement) -> Estimate:
        return self._world.rate(spec, placement)

    def remaining(self, job: Job, at: float) -> Estimate:
        return Estimate(job.remaining_at(at))

    def learn(self, at: float, job: Job, report: ProgressReported) -> None:
        """Ignored: profiles do not change."""
