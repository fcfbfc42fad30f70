"""An estimator that knows the links: rates on devices never tried follow from everybody's measured steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from carpool.core.estimates import Estimate
from carpool.core.messages import ProgressReported, Record
from carpool.core.model import Job, JobId, JobSpec, Kind
from carpool.core.topology import Cluster, Placement
from carpool.predictors.fabric import Fabric
from carpool.predictors.layout import Runner
from carpool.predictors.moves_seen import MovesSeen
from carpool.predictors.throughput import Throughput

_SAME = 2  # steps kept of one training in one place with one batch
_REFIT = 0.25  # of all steps that have to be new before all are fitted again; sooner for a training never seen
_UNSURE = 0.5  # relative spread of a guess
_SAMPLES = 32  # on each device asked for, where a job names no batch

Groups = tuple[tuple[Kind, int], ...]


class Exchanged(NamedTuple):
    """What is known beforehand of a training's transfers."""

    gradient_bytes: float = 0.0  # 0: to be learned
    input_bytes: float = 0.0  # of a sample
    exchange: str = "ring"


@dataclass(slots=True)
class _Work:
    """What a step of a job is worth, in units of its work."""

    per_step: float
    batch: int


class WiredEstimator:
    """Learns step times over the links from all jobs (`Throughput`), and what moves cost (`MovesSeen`).

    A placement says how many devices on each node, not which: any nodes that have them stand for it, so that only what
    devices and nodes of a kind have in common is told apart. Of a job that has not reported yet it is only known how
    places compare. How much work is left is what the spec declares.
    """

    def __init__(
        self, cluster: Cluster, fabric: Fabric | None = None, known: Mapping[str, Exchanged] | None = None
    ) -> None:
        self.version = 0
        self.throughput = Throughput(fabric or Fabric.of(cluster))
        self.moves = MovesSeen()
        self._cluster = cluster
        self._known = dict(known or {})  # by model
        self._work: dict[JobId, _Work] = {}
        self._seen: dict[Runner, int] = {}
        self._trainings: set[str] = set()
        self._fresh: list[tuple[Runner, float]] = []
        self._answers: dict[tuple[str, Groups, int], Estimate] = {}
        self._spots: dict[Groups, tuple[int, ...] | None] = {}

    # ------------------------------------------------------------------------------------------------------- asking
    def rate(self, spec: JobSpec, placement: Placement) -> Estimate:
        """Units of work per second there."""
        share = placement.fraction / max(1.0, placement.load)
        work = self._work.get(spec.id)
        step = self.step_s(spec, placement)
        if work is None or step is None:
            rate = placement.num_devices / spec.devices * share
            if step is not None and (asked := self.step_s(spec, self._asked_for(spec, placement))) is not None:
                rate = asked.mean / step.mean * share  # as declared on what it asked for, and in proportion elsewhere
            return Estimate(rate, rate * _UNSURE)
        batch = placement.batch_size or spec.batch_size or work.batch
        rate = work.per_step * batch / work.batch / step.mean * share
        return Estimate(rate, rate * step.std / step.mean)

    def step_s(self, spec: JobSpec, placement: Placement) -> Estimate | None:
        """Seconds of a step there; None before anything was learned of it."""
        if spec.model not in self._trainings:
            return None
        batch = self._batch(spec, placement)
        key = (spec.model, placement.groups, batch)
        found = self._answers.get(key)
        if found is None:
            runner = self._runner(spec, placement.groups, batch)
            if runner is None:
                return None
            found = self._answers[key] = self.throughput.predict([[runner]])[0][0]
        return found

    def remaining(self, job: Job, at: float) -> Estimate:
        """What the spec declares less what is done."""
        return Estimate(job.remaining_at(at))

    def move_s(self, spec: JobSpec) -> float | None:
        """Seconds that a change of devices costs, as far as moves were seen."""
        return self.moves.move_s(spec)

    # ------------------------------------------------------------------------------------------------------ learning
    def record(self, record: Record) -> None:
        """Follow the scheduler, to see what moves cost."""
        self.moves.record(record)

    def learn(self, at: float, job: Job, report: ProgressReported) -> None:
        """Take in a measured step of whole devices."""
        held = job.observed
        if held is None or not report.step_s or report.rate <= 0.0 or held.fractions != (1.0,):
            return
        placement = self._cluster.placement(held)
        batch = self._batch(job.spec, placement)
        if job.id not in self._work:
            self._work[job.id] = _Work(report.rate * report.step_s, batch)
            self.version += 1
        runner = self._runner(job.spec, placement.groups, batch)
        if runner is None or self._seen.get(runner, 0) >= _SAME:
            return
        self._seen[runner] = self._seen.get(runner, 0) + 1
        self._fresh.append((runner, report.step_s))
        is_new = runner.model not in self._trainings
        if is_new or len(self._fresh) >= _REFIT * max(8, self.throughput.num_steps):
            self._refit()

    def _refit(self) -> None:
        self.throughput.update([[runner] for runner, _ in self._fresh], [[seconds] for _, seconds in self._fresh])
        self._trainings |= {runner.model for runner, _ in self._fresh}
        self._fresh.clear()
        self._answers.clear()
        self.version += 1

    # -------------------------------------------------------------------------------------------------------- inside
    def _batch(self, spec: JobSpec, placement: Placement) -> int:
        return placement.batch_size or spec.batch_size or _SAMPLES * spec.devices

    def _asked_for(self, spec: JobSpec, placement: Placement) -> Placement:
        """As many devices as the job asked for, of the placement's first kind, on as few nodes as possible."""
        kind = placement.groups[0][0]
        whole, rest = divmod(spec.devices, self._cluster.node_size[kind])
        full = ((kind, self._cluster.node_size[kind]),) * whole
        return Placement(((kind, rest), *full) if rest else full, batch_size=placement.batch_size)

    def _runner(self, spec: JobSpec, groups: Groups, batch: int) -> Runner | None:
        """The job on devices that stand for a placement; None where the cluster has none such."""
        if groups not in self._spots:
            self._spots[groups] = _spots(self._cluster, groups)
        devices = self._spots[groups]
        if devices is None:
            return None
        kinds = tuple([str(self._cluster.kind_of(device)) for device in devices])
        samples = (max(1.0, batch / len(devices)),) * len(devices)
        return Runner(spec.model, devices, kinds, samples, *self._known.get(spec.model, Exchanged()))


def _spots(cluster: Cluster, groups: Groups) -> tuple[int, ...] | None:
    """Devices of each group on a node of its own, the first that fits; unlike kinds may share one."""
    used: set[tuple[int, Kind]] = set()
    found: list[int] = []
    for kind, count in sorted(groups, key=lambda group: -group[1]):
        for node in cluster.nodes:
            mine = [device for bank in node.banks if bank.kind == kind for device in bank.devices]
            if len(mine) >= count and (node.id, kind) not in used:
                used.add((node.id, kind))
                found += mine[:count]
                break
        else:
            return None
    return tuple(sorted(found))
