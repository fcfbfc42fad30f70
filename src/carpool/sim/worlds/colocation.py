"""World from co-location measurements: trainings alone and in groups on one device type, at any shares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

from carpool.core.estimates import Estimate, Estimator
from carpool.core.model import JobSpec
from carpool.core.topology import Cluster, Placement
from carpool.predictors.sharing.colocation import ColocationTable, Solo
from carpool.predictors.sharing.interference import Interference, Member
from carpool.predictors.sharing.shared_throughput import SharedThroughput
from carpool.sim.traces.trace import Arrival
from carpool.sim.worlds.base import Pace, TrainingSignals, World

_FILLER = 0.9  # of an idle cycle, what a higher turn can use (AntMan, OSDI'20)


@dataclass(slots=True)
class ColocationWorld(World):
    """Jobs run as measured; work is seconds alone on a whole device at the job's own batch size."""

    table: ColocationTable
    noise: float = 8.0
    known: int = 135
    seed: int = 0
    start_s: float = 0.5  # warm start; a change in place costs `resize_s`: a warm replacement takes over at a step
    resize_s: float = 0.2
    report_every_s: float = 5.0
    _kept: dict[tuple[Member, ...], tuple[float, ...]] = field(default_factory=dict, repr=False)
    _solos: dict[tuple[str, int], Solo] = field(default_factory=dict, repr=False)

    @classmethod
    def load(cls, path: str | Path, seed: int = 0) -> ColocationWorld:
        return cls(ColocationTable.load(path), seed=seed)

    def __post_init__(self) -> None:
        for group, kept in zip(*self.table.samples(), strict=True):
            pairs = sorted(zip(group, kept, strict=True))
            self._kept[tuple(member for member, _ in pairs)] = tuple(min(1.0, value) for _, value in pairs)

    def prepare(self, arrivals: Sequence[Arrival], cluster: Cluster) -> tuple[Sequence[Arrival], Cluster]:
        filled = []
        for at, spec in arrivals:
            self.work(spec)
            profile = self._profile(spec)
            filled.append(Arrival(at, replace(spec, memory_bytes=spec.memory_bytes or profile.memory_bytes)))
        nodes = []
        for node in cluster.nodes:
            banks = [replace(b, memory_bytes=b.memory_bytes or self.table.memory_bytes) for b in node.banks]
            nodes.append(replace(node, banks=tuple(banks)))
        return filled, Cluster(tuple(nodes), cluster.links)

    def pace(self, spec: JobSpec, done: float, placement: Placement) -> Pace:
        own, now = self._profile(spec), self._profile(spec, placement.batch_size)
        m0, m = own.batch_size, now.batch_size
        noise = self.noise * m0
        goodput = (m / now.step_s) / (m0 / own.step_s) * (noise + m0) / (noise + m)
        group = [now.member(placement.fraction)]
        busy = 0.0
        for beside in placement.neighbours:
            profile = self._profile(beside.spec, beside.batch_size)
            if beside.turn < placement.turn:
                busy += profile.fill
            elif beside.turn == placement.turn:
                group.append(profile.member(beside.fraction))
        left = _FILLER * max(0.0, 1.0 - busy) if busy else 1.0
        rate = goodput * now.alone(placement.fraction) * self._keeps(group) * left
        return Pace(rate * placement.num_devices / spec.devices)

    def change_s(self, spec: JobSpec, before: Placement | None, after: Placement) -> float:
        return self.start_s if before is None or before == after else self.resize_s

    def signals(self, spec: JobSpec, done: float, placement: Placement) -> TrainingSignals:
        profile = self._profile(spec, placement.batch_size)
        return TrainingSignals(noise=self.noise * self._profile(spec).batch_size, step_s=profile.step_s)

    def estimator(self) -> Estimator:
        groups = list(self.table.groups)
        drawn = Random(self.seed).sample(groups, min(self.known, len(groups)))
        model = Interference("gp").fit(*self.table.samples(drawn)) if drawn else Interference("gp")
        return SharedThroughput(self.table.profiles, model, noise=self.noise)

    def _profile(self, spec: JobSpec, batch_size: int = 0) -> Solo:
        key = (spec.model, batch_size or spec.batch_size)
        found = self._solos.get(key)
        if found is None:
            found = self._solos[key] = self.table.profile(*key)
        return found

    def _keeps(self, group: Sequence[Member]) -> float:
        """The fraction of its rate that the first of a group keeps, measured or predicted."""
        if len(group) == 1:
            return 1.0
        key = tuple(sorted(group))
        kept = self._kept.get(key)
        if kept is None:
            answers: list[Estimate] = self.table.interference.predict([key])[0]
            kept = self._kept[key] = tuple(answer.mean for answer in answers)
        return kept[key.index(group[0])]
