"""World with link bandwidths: step times follow from compute and from transfers over buses and a network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import exp, log
from random import Random

from carpool.core.errors import CarpoolError
from carpool.core.estimates import Estimator
from carpool.core.model import JobSpec, Kind
from carpool.core.topology import Cluster, Placement
from carpool.predictors.links.estimator import LinkEstimator
from carpool.sim.traces.trace import Arrival
from carpool.sim.worlds.base import Oracle, SteadyWorld, TrainingSignals

_WIDER = 4  # a job may use up to this many times the devices it requests
_SAMPLES = 32  # on each device asked for
_REPORT_S = 30.0
_STATE = 3.0  # bytes of state for each of the gradients: parameters and two moments


@dataclass(frozen=True, slots=True)
class WiredModel:
    """One model, drawn from the seed and its name."""

    fixed_s: float
    per_sample_s: float
    gradient_bytes: float
    hidden: float  # part of computing behind which transfers hide

    @classmethod
    def drawn(cls, seed: int, name: str) -> WiredModel:
        random = Random(f"{seed} {name}")
        return cls(
            _between(random, 0.005, 0.05),
            _between(random, 2e-4, 4e-3),
            _between(random, 2e7, 1e9),
            random.uniform(0.2, 0.7),
        )


@dataclass(slots=True)
class WiredWorld(SteadyWorld):
    """Rate = step time on the requested devices over that here; m samples on n devices take T seconds.

        C = slowness · (a + b·m/n),   S = 2(n − 1)/n · bytes / slowest link,   T = C + max(0, S − hidden·C)

    A ring's slowest link is a bus on one node and the network over several, not shared. Device types after the first
    are up to three times slower, their buses up to eight times. A change of devices costs `resize_s` and the transfer
    of the state; a start costs `start_s`. Jobs may use one to four times the devices they requested. All is drawn from
    the seed.
    """

    seed: int = 0
    start_s: float = 8.0
    resize_s: float = 1.0  # of a change of devices, beside the time its state takes
    report_every_s: float = _REPORT_S
    _models: dict[str, WiredModel] = field(default_factory=dict, init=False, repr=False)
    _cluster: Cluster | None = field(default=None, init=False, repr=False)
    _slowness: dict[Kind, float] = field(default_factory=dict, init=False, repr=False)
    _buses: dict[Kind, float] = field(default_factory=dict, init=False, repr=False)  # bytes per second
    _network: float = field(default=1e9, init=False, repr=False)

    def prepare(self, arrivals: Sequence[Arrival], cluster: Cluster) -> tuple[Sequence[Arrival], Cluster]:
        random = Random(self.seed)
        self._cluster = cluster
        self._network = _between(random, 1e9, 6e9)
        for place, kind in enumerate(cluster.kinds):
            self._slowness[kind] = random.uniform(1.5, 3.0) if place else 1.0
            self._buses[kind] = _between(random, 3e10, 1e11) / (random.uniform(2.0, 8.0) if place else 1.0)
        return [Arrival(at, self._elastic(spec)) for at, spec in arrivals], cluster

    def _elastic(self, spec: JobSpec) -> JobSpec:
        self.work(spec)
        assert self._cluster is not None
        most = min(max(self._cluster.capacity.values()), _WIDER * spec.devices)
        state = int(_STATE * self.model(spec).gradient_bytes)
        batch = spec.batch_size or _SAMPLES * spec.devices
        return replace(spec, min_devices=1, max_devices=most, batch_size=batch, memory_bytes=state)

    def change_s(self, spec: JobSpec, before: Placement | None, after: Placement) -> float:
        if before is None:
            return self.start_s
        return self.resize_s + _STATE * self.model(spec).gradient_bytes / self._network

    def signals(self, spec: JobSpec, done: float, placement: Placement) -> TrainingSignals:
        return TrainingSignals(step_s=self.step_s(spec, placement))

    def estimator(self) -> Estimator:
        if self._cluster is None:
            raise CarpoolError("WiredWorld.estimator is asked before WiredWorld.prepare has named the cluster")
        return LinkEstimator(self._cluster)

    def model(self, spec: JobSpec) -> WiredModel:
        """A job's model; jobs without a name share one."""
        if spec.model not in self._models:
            self._models[spec.model] = WiredModel.drawn(self.seed, spec.model)
        return self._models[spec.model]

    def step_s(self, spec: JobSpec, placement: Placement) -> float:
        model, count = self.model(spec), placement.num_devices
        samples = (placement.batch_size or spec.batch_size) / count
        kinds = placement.kinds
        compute = max(self._slowness[kind] for kind in kinds) * (model.fixed_s + model.per_sample_s * samples)
        slowest = min(self._buses[kind] for kind in kinds)
        if len(placement.groups) > 1:
            slowest = min(slowest, self._network)
        sync = 2.0 * (count - 1) / count * model.gradient_bytes / slowest
        return compute + max(0.0, sync - model.hidden * compute)

    def rate(self, spec: JobSpec, placement: Placement) -> float:
        assert self._cluster is not None
        kind = self._cluster.kinds[0]
        whole, rest = divmod(spec.devices, self._cluster.node_size[kind])
        groups = ((kind, self._cluster.node_size[kind]),) * whole
        asked = Placement(((kind, rest), *groups) if rest else groups)
        batch = placement.batch_size or spec.batch_size
        rate = batch / spec.batch_size * self.step_s(spec, asked) / self.step_s(spec, placement)
        return rate * placement.fraction / max(1.0, placement.load)

    def oracle(self) -> Estimator:
        return WiredOracle(self)


@dataclass(frozen=True, slots=True)
class WiredOracle(Oracle[WiredWorld]):
    """Oracle of a `WiredWorld`."""

    def move_s(self, spec: JobSpec) -> float:
        anywhere = Placement(())
        return self.world.change_s(spec, anywhere, anywhere)


def _between(random: Random, low: float, high: float) -> float:
    """Log-uniform."""
    return exp(random.uniform(log(low), log(high)))
