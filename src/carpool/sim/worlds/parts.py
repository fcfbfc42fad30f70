"""World of steps split into a fixed number of parts, on heterogeneous devices (the setting of Hare)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heapreplace
from random import Random
from typing import ClassVar, NamedTuple

import numpy as np

from carpool.core.errors import UnknownName
from carpool.core.estimates import Estimator
from carpool.core.model import JobSpec, Kind
from carpool.core.topology import Cluster, Placement
from carpool.policies.hare.relaxation import Demand, lower_bound
from carpool.sim.traces.trace import Arrival
from carpool.sim.worlds.base import Oracle, SteadyWorld

Groups = tuple[tuple[Kind, int], ...]

KINDS = ("V100", "P100", "T4", "K80")  # from the fastest to the slowest
# Seconds of a switch without and with PipeSwitch: Tab. 1 of the Hare study.
_SWITCH_S = {
    "vgg19": (3.28894, 0.00401),
    "resnet50": (5.96116, 0.00475),
    "inceptionv3": (7.80743, 0.00503),
    "bert": (9.01699, 0.01257),
    "transformer": (5.25717, 0.01034),
    "deepspeech": (5.12564, 0.00891),
    "fastgcn": (5.32724, 0.00286),
    "graphsage": (5.21354, 0.00242),
}
_FAST_S = 0.004
_NEGLIGIBLE_S = 1e-6  # jobs this short count as taking no time in a bound, which is then a little lower
SWITCHES = ("fast", "pipelined", "cold")
_SLOWDOWNS = ((1.0, 1.0), (1.2, 2.5), (1.8, 4.0), (2.5, 6.3))
_NUM_INSENSITIVE, _INSENSITIVE = 2, 0.35  # this many models suffer only this portion of a slower kind's slowdown


class PartsStep(NamedTuple):
    """One step of a job: its duration, and the portion of it each device type is idle."""

    seconds: float
    idle: Mapping[Kind, float]


@dataclass(frozen=True, slots=True)
class PartsWorld(SteadyWorld):
    """Relaxed fixed-scale synchronization: a step is always `spec.devices` equal parts, on any number of devices.

    A part of model m takes `part_s[m][kind]`. Each part goes to the device that would end it first, which gives the
    shortest step; fewer devices than parts work in waves, and devices that end early wait. Work is seconds on as many
    devices of the fastest type as the job has parts, so rate = part_s[fastest] / step. Nodes do not matter.

    A job of a higher turn runs in the gaps of lower turns and never slows them. A device type that is idle for the
    portion g of their step runs its parts at g' = g - 2·switch/step of its speed. Of several jobs of lower turns the
    busiest counts. Jobs of equal turn share by fraction.

    A start or a move costs a switch: 4 ms (`fast`), or what Tab. 1 of the Hare study lists for the model with
    PipeSwitch (`pipelined`) or without anything (`cold`, 3 to 9 s).
    """

    bounds_jct: ClassVar[bool] = True

    part_s: Mapping[str, Mapping[str, float]]  # by model, then by kind, the fastest first
    switch: str = "fast"
    _steps: dict[tuple[str, int, Groups], PartsStep] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if self.switch not in SWITCHES:
            raise UnknownName("switch", self.switch, SWITCHES)

    @classmethod
    def generate(cls, seed: int, switch: str = "fast", kinds: Sequence[str] = KINDS) -> PartsWorld:
        """Eight models: a part takes U(0.06, 0.6) s on the fastest type; each type is slower by its own factor."""
        rng = Random(f"{seed}/parts")
        insensitive = rng.sample(list(_SWITCH_S), _NUM_INSENSITIVE)
        part_s: dict[str, dict[str, float]] = {}
        for model in _SWITCH_S:
            base_s = rng.uniform(0.06, 0.6)
            felt = _INSENSITIVE if model in insensitive else 1.0
            slowdowns = [1.0 + felt * (rng.uniform(*limits) - 1.0) for limits in _SLOWDOWNS]
            part_s[model] = {kind: base_s * slow for kind, slow in zip(kinds, slowdowns, strict=True)}
        return cls(part_s, switch)

    def prepare(self, arrivals: Sequence[Arrival], cluster: Cluster) -> tuple[Sequence[Arrival], Cluster]:
        for _, spec in arrivals:
            if spec.model not in self.part_s:
                raise UnknownName("model", spec.model, self.part_s, where=f"job {spec.id!r} in this world")
            self.work(spec)
        for kind in cluster.kinds:
            for model, known in self.part_s.items():
                if kind not in known:
                    raise UnknownName("device type", kind, known, where=f"model {model!r} in this world")
        return [Arrival(at, replace(spec, min_devices=1, max_devices=0)) for at, spec in arrivals], cluster

    def change_s(self, spec: JobSpec, before: Placement | None, after: Placement) -> float:
        stays = before is not None and before.groups == after.groups and before != after
        return 0.0 if stays else self.switch_s(spec)

    def estimator(self) -> Estimator:
        return PartsOracle(self)

    def weighted_jct_bound_s(self, arrivals: Sequence[Arrival], cluster: Cluster) -> float:
        """By the relaxation: no barriers, no switches, divisible parts, known arrivals."""
        kinds = cluster.kinds
        long = [(at, spec) for at, spec in arrivals if self.work(spec) > _NEGLIGIBLE_S]
        if not long:
            return 0.0
        parts_s = [self.part_s[spec.model] for _, spec in long]
        reference_s = np.array([next(iter(part_s.values())) for part_s in parts_s])
        widths = np.array([float(spec.devices) for _, spec in long])
        demand = Demand(
            speeds=(reference_s / widths)[:, None] / np.array([[part_s[kind] for kind in kinds] for part_s in parts_s]),
            widths=widths,
            work=np.array([self.work(spec) for _, spec in long]),
            weights=np.array([spec.weight for _, spec in long]),
            capacity=np.array([float(cluster.capacity[kind]) for kind in kinds]),
            released=np.array([at for at, _ in long]),
        )
        return lower_bound(demand) / sum([spec.weight for _, spec in arrivals])

    def switch_s(self, spec: JobSpec) -> float:
        """Seconds until a job's first part begins on a device that ran another job."""
        if self.switch == "fast":
            return _FAST_S
        cold_s, pipelined_s = _SWITCH_S.get(spec.model, (5.0, 0.006))
        return cold_s if self.switch == "cold" else pipelined_s

    def step(self, spec: JobSpec, groups: Groups) -> PartsStep:
        key = (spec.model, spec.devices, groups)
        found = self._steps.get(key)
        if found is None:
            found = self._steps[key] = dealt(self.part_s[spec.model], spec.devices, groups)
        return found

    def rate(self, spec: JobSpec, placement: Placement) -> float:
        part_s = self.part_s[spec.model]
        base_s = next(iter(part_s.values()))
        if not placement.neighbours:
            return base_s / self.step(spec, placement.groups).seconds * placement.fraction
        left: dict[str, float] = {}
        load = placement.fraction
        for beside in placement.neighbours:
            if beside.turn == placement.turn:
                load += beside.fraction
            elif beside.turn < placement.turn and not beside.groups:
                return 0.0  # its devices, and so its gaps, are unknown
            elif beside.turn < placement.turn:
                step = self.step(beside.spec, beside.groups)
                lost = 2.0 * self.switch_s(spec) / step.seconds
                for kind, idle in step.idle.items():
                    left[kind] = min(left.get(kind, 1.0), max(0.0, idle - lost))
        groups = tuple([(kind, count) for kind, count in placement.groups if left.get(kind, 1.0) > 0.0])
        if not groups:
            return 0.0
        slowed: dict[str, float] = {kind: part_s[kind] / left.get(kind, 1.0) for kind, _ in groups}
        share = placement.fraction / (load if left else max(1.0, load))  # jobs in a gap share all of it
        return base_s / dealt(slowed, spec.devices, groups).seconds * share


def dealt(part_s: Mapping[str, float], num_parts: int, groups: Groups) -> PartsStep:
    """Assign equal parts to heterogeneous devices, each to the one that would end it first."""
    ends = [(part_s[kind], kind) for kind, count in groups for _ in range(count)]  # end of each device's next part
    heapify(ends)
    busy = dict.fromkeys([kind for kind, _ in groups], 0.0)
    seconds = 0.0
    for _ in range(num_parts):
        seconds, kind = ends[0]
        busy[kind] += part_s[kind]
        heapreplace(ends, (seconds + part_s[kind], kind))
    counts = dict.fromkeys(busy, 0)
    for kind, count in groups:
        counts[kind] += count
    return PartsStep(seconds, {kind: max(0.0, 1.0 - busy[kind] / (counts[kind] * seconds)) for kind in busy})


@dataclass(frozen=True, slots=True)
class PartsOracle(Oracle[PartsWorld]):
    """Oracle of a `PartsWorld`."""

    def idle(self, spec: JobSpec, groups: Groups) -> Mapping[Kind, float]:
        return self.world.step(spec, groups).idle
