"""Pollux's measured profiles as a world: progress by goodput, epoch by epoch, and a standstill for every move."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from carpool.core.errors import CarpoolError, InputError, UnknownName
from carpool.core.estimates import Estimate, Estimator
from carpool.core.messages import ProgressReported
from carpool.core.model import Job, JobId, JobSpec
from carpool.core.topology import Cluster, Placement
from carpool.predictors.agents import PolluxAgents
from carpool.sim.traces.trace import Arrival
from carpool.sim.world import Pace, Signs
from carpool.sim.worlds.pollux_profiles import Application, Counts


class ApplicationRules(NamedTuple):
    """What the published simulator says of an application beside its profile."""

    epochs: int
    micro_max: int | None = None  # None: the largest measured one
    most_devices: int = 0  # 0: as many as the batch can be cut for
    batch_size: int = 0  # above 0: this batch and no other is used


# Applications that are not listed run all epochs of their profile, with any batch and number of devices.
PUBLISHED = {
    "bert": ApplicationRules(2),
    "cifar10": ApplicationRules(100),
    "deepspeech2": ApplicationRules(80),
    "imagenet": ApplicationRules(90),
    "ncf": ApplicationRules(10, most_devices=1, batch_size=32768),
    "yolov3": ApplicationRules(50, micro_max=8),
}


class PolluxStep(NamedTuple):
    """One training step somewhere."""

    batch: int  # samples, after rounding to equal passes
    seconds: float
    sync_s: float


@dataclass(slots=True)
class PolluxWorld:
    """Jobs get on by goodput as measured (A. Qiao et al., OSDI 2021, and the published simulator's profiles).

    Work is progress in steps of the reference batch m0, the smallest that was validated; it ends with the last epoch.
    With batch b, var and sqr of the epoch's gradient, and φ = m0·var/sqr the noise scale in samples,

        rate = gain / T,   gain = (var + sqr)/(var·m0/b + sqr) = (b/m0)·(φ + m0)/(φ + b)

    T is the measured step time; each further pass of a step that is done in several adds T less the synchronisation.
    Where the data is silent:

    - All kinds of devices are alike.
    - Devices beyond what the batch can be cut for stand idle.
    - Devices are shared by fraction, scaled down where the fractions sum past 1.
    - A change of batch size alone costs nothing, every other change `standstill_s`. Nothing is lost in a crash.
    """

    profiles: Mapping[str, Application]
    rules: Mapping[str, ApplicationRules] = field(default_factory=lambda: PUBLISHED)
    standstill_s: float = 30.0
    report_every_s: float = 30.0
    _cluster: Cluster | None = field(default=None, repr=False)
    _steps: dict[tuple[str, Counts, int], PolluxStep] = field(default_factory=dict, repr=False)

    @classmethod
    def load(cls, folder: str | Path, *, rules: Mapping[str, ApplicationRules] = PUBLISHED) -> PolluxWorld:
        """Read the folder with one folder for each application, or the one above it that holds ``profiles``."""
        folder = Path(folder)
        inner = folder / "profiles"
        folder = inner if inner.is_dir() else folder
        way_out = "Give the folder that holds profiles/APPLICATION/placements.csv."
        if not folder.is_dir():
            raise InputError("is no folder", where=str(folder), way_out=way_out)
        profiles = {}
        for path in sorted(folder.iterdir()):
            if (path / "placements.csv").is_file():
                rule = rules.get(path.name)
                limits = rule._asdict() if rule else {}
                limits.pop("batch_size", None)
                profiles[path.name] = Application.load(path, **limits)
        if not profiles:
            raise InputError("holds no profile of any application", where=str(folder), way_out=way_out)
        return cls(profiles, rules)

    # ------------------------------------------------------------------------------------------------ world port
    def prepare(self, arrivals: Sequence[Arrival], cluster: Cluster) -> tuple[Sequence[Arrival], Cluster]:
        """Make every job elastic in devices and batch, within what its application allows."""
        self._cluster = cluster
        return [Arrival(at, self._elastic(spec)) for at, spec in arrivals], cluster

    def work(self, spec: JobSpec) -> float:
        """Progress at the end of the last epoch."""
        return self.profile(spec).ends[-1]

    def pace(self, spec: JobSpec, done: float, placement: Placement) -> Pace:
        """Goodput in the present epoch, until its end."""
        profile = self.profile(spec)
        epoch = profile.epoch(done)
        return Pace(self.rate(spec, epoch, placement), profile.ends[epoch])

    def price(self, spec: JobSpec, before: Placement | None, after: Placement) -> float:
        """The standstill, unless only the batch changes."""
        if before is not None and before.groups == after.groups and before.batch_size != after.batch_size:
            return 0.0
        return self.standstill_s

    def signs(self, spec: JobSpec, done: float, placement: Placement) -> Signs:
        """Noise scale, and the seconds of a step."""
        profile, step = self.profile(spec), self.step(spec, placement)
        return Signs(None, profile.noise(step.batch, profile.epoch(done)), step.seconds, step.sync_s)

    def kept(self, spec: JobSpec, done: float) -> float:
        """Everything."""
        return done

    def estimator(self) -> Estimator:
        """An oracle of rates, steps and lengths, which learns goodput as Pollux's agents do."""
        if self._cluster is None:
            raise CarpoolError("PolluxWorld.estimator is asked before PolluxWorld.prepare has named the cluster")
        return PolluxEstimator(self, self._cluster)

    # ------------------------------------------------------------------------------------------------- formulas
    def profile(self, spec: JobSpec) -> Application:
        """The profile of a job's application."""
        found = self.profiles.get(spec.model)
        if found is None:
            raise UnknownName("application", spec.model, self.profiles, where=f"job {spec.id!r}")
        return found

    def step(self, spec: JobSpec, placement: Placement) -> PolluxStep:
        """Batch and seconds of one step in a placement."""
        limits = self.profile(spec).limits
        batch = placement.batch_size or spec.batch_size or limits.reference
        counts = tuple([count for _, count in placement.groups])
        key = (spec.model, counts, batch)
        found = self._steps.get(key)
        if found is None:
            counts = _usable(counts, max(1, batch // limits.micro_min))
            micro, extra = limits.cut(batch, sum(counts))
            step_s, sync_s = self.profile(spec).times(counts, micro)
            seconds = step_s + (step_s - sync_s) * extra
            found = self._steps[key] = PolluxStep(sum(counts) * micro * (extra + 1), seconds, sync_s)
        return found

    def rate(self, spec: JobSpec, epoch: int, placement: Placement) -> float:
        """Progress per second in an epoch."""
        profile, step = self.profile(spec), self.step(spec, placement)
        reference, noise = profile.limits.reference, profile.noise(step.batch, epoch)
        rate = step.batch / reference * (noise + reference) / (noise + step.batch) / step.seconds
        if placement.fraction != 1.0 or placement.neighbours:
            rate *= placement.fraction / max(1.0, placement.load)
        return rate

    def _elastic(self, spec: JobSpec) -> JobSpec:
        profile, rule = self.profile(spec), self.rules.get(spec.model)
        limits = profile.limits
        batches = (rule.batch_size,) * 2 if rule and rule.batch_size else (limits.reference, limits.largest)
        widest = max(profile.widest, spec.devices)
        return replace(spec, min_devices=1, max_devices=widest, batch_range=batches)


class PolluxEstimator:
    """Two levels of knowledge in one: what the profiles say (rates, steps, lengths) and what a job's reports teach.

    `goodputs` answers from the job's own reports alone, as Pollux's agents do; everything else is the truth of the
    epoch that the job last reported from.
    """

    def __init__(self, world: PolluxWorld, cluster: Cluster) -> None:
        self._world = world
        self._epochs: dict[JobId, int] = {}
        self._changes = 0
        self._agents = PolluxAgents(cluster, {name: profile.limits for name, profile in world.profiles.items()})

    @property
    def version(self) -> int:
        """Grows with every new epoch and every lesson."""
        return self._changes + self._agents.version

    def rate(self, spec: JobSpec, placement: Placement) -> Estimate:
        """The true rate."""
        return Estimate(self._world.rate(spec, self._epochs.get(spec.id, 0), placement))

    def remaining(self, job: Job, at: float) -> Estimate:
        """True work less work done."""
        return Estimate(max(0.0, self._world.work(job.spec) - job.done_at(at)))

    def learn(self, at: float, job: Job, report: ProgressReported) -> None:
        """Notice the epoch, and let the job's agent learn."""
        epoch = self._world.profile(job.spec).epoch(report.done)
        if self._epochs.get(job.id, 0) != epoch:
            self._epochs[job.id] = epoch
            self._changes += 1
        self._agents.learn(at, job, report)

    def step_s(self, spec: JobSpec, placement: Placement) -> float:
        """Seconds of a step there."""
        return self._world.step(spec, placement).seconds

    def move_s(self, spec: JobSpec) -> float:
        """What every change costs."""
        return self._world.standstill_s

    def steps_left(self, job: Job, at: float) -> float:
        """Steps after the present epoch at the job's own batch, at least one, as the published simulator counts."""
        profile = self._world.profile(job.spec)
        batch = job.spec.batch_size or profile.limits.reference
        return max(1.0, profile.steps_after(batch, profile.epoch(job.done_at(at))))

    def goodputs(self, spec: JobSpec, counts: Sequence[int], several: Sequence[bool]) -> Sequence[tuple[float, int]]:
        """What the job's agent believes."""
        return self._agents.goodputs(spec, counts, several)


def _usable(counts: Counts, most: int) -> Counts:
    """At most so many of the devices, from the fullest nodes first."""
    if sum(counts) <= most:
        return counts
    kept: list[int] = []
    for count in sorted(counts, reverse=True):
        part = min(count, most - sum(kept))
        if part:
            kept.append(part)
    return tuple(sorted(kept))
