"""Parametric world: scaling, device types, contention, costs of changes, loss and gradient noise by formula."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp, floor, inf
from pathlib import Path
from random import Random

from carpool.core.errors import UnknownName
from carpool.core.estimates import Estimate, Estimator, Use
from carpool.core.messages import ProgressReported
from carpool.core.model import Job, JobId, JobSpec, Kind
from carpool.core.topology import Cluster, Placement
from carpool.sim.traces.trace import Arrival
from carpool.sim.worlds.base import Pace, TrainingSignals, World
from carpool.sim.worlds.contention import Contender, Contention
from carpool.sim.worlds.traits import ChangeCosts, KindTraits, ModelTraits, draw_kinds, draw_models
from carpool.sim.worlds.world_file import DEFAULT, TopLevelKeys, read_world

Groups = tuple[tuple[Kind, int], ...]

_PHASES = 20  # steps in which the noise scale changes over a training
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class ParametricWorld(World):
    """Rates by formula; `ModelTraits`, `KindTraits`, `ChangeCosts` and `Contention` explain the parameters.

    Work is seconds alone on the requested devices, of the reference type, at the job's own batch size m0; jobs without
    a length get their model's. With batch size m (of all devices together) and step time T the rate is

        (m/T · EFF) / (m0/T_reference),   EFF = (φ + m0)/(φ + m)

    φ being the gradient noise scale at that point of the training (Pollux, OSDI'21; IADeep). On heterogeneous devices
    the batch is split so that all end together. Neighbours slow the compute part of a step by `Contention`; those of a
    gang count as if all were on one device, since a gang waits for its slowest part.
    """

    models: Mapping[str, ModelTraits] = field(default_factory=dict)
    kinds: Mapping[str, KindTraits] = field(default_factory=dict)
    prices: ChangeCosts = field(default_factory=ChangeCosts)
    contention: Contention = field(default_factory=Contention)
    setting: TopLevelKeys = field(default_factory=TopLevelKeys)
    _whole_s: dict[tuple[str, Groups, int], float] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def load(cls, path: str | Path, *, seed: int | None = None) -> ParametricWorld:
        """From a TOML file (see docs/worlds.md); `seed` overrides the file's."""
        file = read_world(Path(path))
        setting = file.setting if seed is None else replace(file.setting, seed=seed)
        return cls(file.models, file.kinds, file.prices, file.contention, setting)

    @classmethod
    def generate(
        cls, seed: int, *, models: str | Sequence[str] = "vision", kinds: Sequence[str] = ("V100",), noise: float = 0.0
    ) -> ParametricWorld:
        """Models of a named mix (`traits.MIXES`) or of the given names, on device types from fastest to slowest."""
        setting = TopLevelKeys(reference=kinds[0], noise=noise, seed=seed)
        return cls(draw_models(seed, models, kinds), draw_kinds(kinds), setting=setting)

    def work(self, spec: JobSpec) -> float:
        return self.traits(spec).work if spec.work is None else spec.work

    def pace(self, spec: JobSpec, done: float, placement: Placement) -> Pace:
        traits, work = self.traits(spec), self.work(spec)
        if self.batch(spec, placement.batch_size) == self.batch(spec):
            return Pace(self.rate(spec, placement, 0.0))
        phase = _phase(done, work)
        until = (phase + 1) * work / _PHASES if phase + 1 < _PHASES else inf
        return Pace(self.rate(spec, placement, traits.noise_at(phase / _PHASES)), until)

    def change_s(self, spec: JobSpec, before: Placement | None, after: Placement) -> float:
        prices, own = self.prices, self.traits(spec).start_s
        if before is None:
            return prices.start_s if own is None else own
        if before.groups != after.groups:
            return prices.resize_s
        changes = [
            prices.share_s if before.fraction != after.fraction else 0.0,
            prices.batch_s if before.batch_size != after.batch_size else 0.0,
            prices.switch_s if before.turn != after.turn else 0.0,
        ]
        return max(changes) if any(changes) else prices.resize_s

    def signals(self, spec: JobSpec, done: float, placement: Placement) -> TrainingSignals:
        traits, work = self.traits(spec), self.work(spec)
        return TrainingSignals(traits.loss_at(done / work), traits.noise_at(_phase(done, work) / _PHASES))

    def checkpointed(self, spec: JobSpec, done: float) -> float:
        every = self.setting.checkpoint_every
        return done - done % every if every else done

    def estimator(self) -> Estimator:
        return ParametricEstimator(self)

    def traits(self, spec: JobSpec) -> ModelTraits:
        return self.models.get(spec.model) or self.models.get(DEFAULT) or _DEFAULT_TRAITS

    def batch(self, spec: JobSpec, asked: int = 0) -> int:
        """Samples of one step over all devices: as asked, else the spec's, else the model's per device."""
        return asked or spec.batch_size or self.traits(spec).batch_size * spec.devices

    def slowdown(self, spec: JobSpec, kind: Kind) -> float:
        """Step time on a type over that on the reference type."""
        own = self.traits(spec).slowdown.get(kind)
        if own is not None:
            return own
        known = self.kinds.get(kind)
        return 1.0 if known is None else known.slowdown

    def step_s(self, spec: JobSpec, groups: Groups, batch: int, speed: float = 1.0) -> float:
        traits = self.traits(spec)
        count = sum([count for _, count in groups])
        might = sum([count / self.slowdown(spec, kind) for kind, count in groups])
        compute = (traits.per_sample_s * batch + traits.fixed_s * count) / might / speed
        if count == 1:
            return compute
        sync = traits.sync_s + traits.sync_more_s * (count - 2) + traits.network_s * (len(groups) - 1)
        gamma = traits.overlap
        return float((compute**gamma + sync**gamma) ** (1.0 / gamma))

    def reference_s(self, spec: JobSpec) -> float:
        """Seconds of one step on the requested number of reference devices."""
        whole, rest = divmod(spec.devices, self.setting.node_size)
        kind = self.reference
        groups = ((kind, self.setting.node_size),) * whole + (((kind, rest),) if rest else ())
        key = (spec.model, groups, self.batch(spec))
        found = self._whole_s.get(key)
        if found is None:
            found = self._whole_s[key] = self.step_s(spec, groups, key[2])
        return found

    @property
    def reference(self) -> Kind:
        """The device type that work is counted on."""
        return Kind(self.setting.reference or next(iter(self.kinds), ""))

    def rate(self, spec: JobSpec, placement: Placement, noise: float) -> float:
        """Units of work per second at a gradient noise scale."""
        speed = self.speed(spec, placement)
        if speed <= 0.0:
            return 0.0
        own, batch = self.batch(spec), self.batch(spec, placement.batch_size)
        rate = self.reference_s(spec) / self.step_s(spec, placement.groups, batch, speed)
        return rate if batch == own else rate * batch / own * (noise + own) / (noise + batch)

    def speed(self, spec: JobSpec, placement: Placement) -> float:
        kind = max(placement.kinds, key=lambda kind: (self.slowdown(spec, kind), kind))
        width = placement.num_devices
        use = self.use(spec, kind, placement.batch_size, width)
        own = Contender(*use, placement.fraction, placement.turn)
        needed = self.memory(spec, placement.batch_size, width)
        others: list[Contender] = []
        for beside in placement.neighbours:
            others.append(Contender(*self.use(beside.spec, kind, beside.batch_size), beside.fraction, beside.turn))
            needed += self.memory(beside.spec, beside.batch_size)
        there = self.kinds.get(kind)
        squeezed = 1.0 if there is None else self.contention.squeezed(needed, there.memory)
        return squeezed * self.contention.speed(own, others)

    def use(self, spec: JobSpec, kind: Kind, batch_size: int = 0, width: int = 0) -> Use:
        """SM and bandwidth use alone on a device of a type; higher on slower types."""
        traits = self.traits(spec)
        samples = self.batch(spec, batch_size) / (width or spec.devices)
        scale = traits.fill(samples) / traits.fill(traits.batch_size) * self.slowdown(spec, kind)
        return Use(min(1.0, traits.sm * scale), min(1.0, traits.memory_bw * scale))

    def memory(self, spec: JobSpec, batch_size: int = 0, width: int = 0) -> int:
        """Bytes per device: declared at the own batch size and device count, else by formula."""
        traits = self.traits(spec)
        batch, width = self.batch(spec, batch_size), width or spec.devices
        if spec.memory_bytes and batch == self.batch(spec) and width == spec.devices:
            return spec.memory_bytes
        return traits.memory + int(traits.memory_per_sample * batch / width)

    def prepare(self, arrivals: Sequence[Arrival], cluster: Cluster) -> tuple[Sequence[Arrival], Cluster]:
        """Jobs and devices with their memory filled in, so that overbooking is detected."""
        return [Arrival(at, self.declared(spec)) for at, spec in arrivals], self.furnished(cluster)

    def declared(self, spec: JobSpec) -> JobSpec:
        return spec if spec.memory_bytes else replace(spec, memory_bytes=self.memory(spec))

    def furnished(self, cluster: Cluster) -> Cluster:
        """The cluster with the memory of its device types filled in; types must be known, if any are."""
        for kind in cluster.kinds:
            if self.kinds and kind not in self.kinds:
                raise UnknownName("device type", kind, self.kinds, where="this world")
        nodes = []
        for node in cluster.nodes:
            banks = [
                replace(bank, memory_bytes=bank.memory_bytes or self.kinds.get(bank.kind, KindTraits()).memory)
                for bank in node.banks
            ]
            nodes.append(replace(node, banks=tuple(banks)))
        return Cluster(tuple(nodes), cluster.links)


class ParametricEstimator(Estimator):
    """Knows the world's formulas, use and memory, and the noise scale that jobs have reported.

    With `noise` σ every rate is off by a factor exp(σ·z), z drawn from the seed per model and placement, so
    repeated queries agree.
    """

    version = 0

    def __init__(self, world: ParametricWorld) -> None:
        self._world = world
        self._noise: dict[JobId, float] = {}  # newest report of each job whose batch may be tuned
        self._errors: dict[tuple[object, ...], float] = {}
        self._uses: dict[tuple[str, int, int, Kind], Use] = {}

    def rate(self, spec: JobSpec, placement: Placement) -> Estimate:
        world = self._world
        noise = self._noise.get(spec.id)
        if noise is None:
            noise = world.traits(spec).noise_scale[0]
        rate = world.rate(spec, placement, noise)
        sigma = world.setting.noise
        if not sigma:
            return Estimate(rate)
        rate *= exp(sigma * self._error(spec, placement))
        return Estimate(rate, rate * sigma)

    def remaining(self, job: Job, at: float) -> Estimate:
        return Estimate(max(0.0, self._world.work(job.spec) - job.done_at(at)))

    def learn(self, at: float, job: Job, report: ProgressReported) -> None:
        if report.noise is None or job.spec.batch_range is None:
            return
        if self._noise.get(job.spec.id) != report.noise:
            self._noise[job.spec.id] = report.noise
            self.version += 1

    def use(self, spec: JobSpec, kind: Kind) -> Use:
        key = (spec.model, spec.batch_size, spec.devices, kind)
        found = self._uses.get(key)
        if found is None:
            found = self._uses[key] = self._world.use(spec, kind)
        return found

    def memory(self, spec: JobSpec, batch_size: int = 0) -> int:
        return self._world.memory(spec, batch_size)

    def _error(self, spec: JobSpec, placement: Placement) -> float:
        beside = sorted((n.spec.model, n.fraction, n.batch_size, n.turn) for n in placement.neighbours)
        shape = (placement.groups, placement.fraction, placement.batch_size, placement.turn)
        key = (spec.model, spec.devices, spec.batch_size, *shape, *beside)
        found = self._errors.get(key)
        if found is None:
            found = self._errors[key] = Random(f"{self._world.setting.seed}/{key}").gauss(0.0, 1.0)
        return found


_DEFAULT_TRAITS = ModelTraits()


def _phase(done: float, work: float) -> int:
    return min(_PHASES - 1, floor(done / work * _PHASES + _ROUNDING))
