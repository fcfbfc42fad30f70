"""Figures of a federation from its records: idle time at the barrier, mismatch of work and data, bytes moved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from carpool.federated.cycle_plan import mismatch
from carpool.federated.federation import DeviceName, Federation, TaskName
from carpool.federated.messages import CloseCycle, DeviceJoined, Outcome, Record, StartWork, TaskResult, WorkReported


class CycleFigures(NamedTuple):
    """What one cycle cost."""

    cycle: int
    seconds: float
    idle: Mapping[DeviceName, float]  # seconds each device waited for the last one
    mismatch: float  # of work and data (`mismatch`), the mean over devices
    samples: int
    num_bytes: int  # of updates and of the weights sent for them
    started_at: float = 0.0
    missing: tuple[DeviceName, ...] = ()  # devices it was closed without
    worked: Mapping[DeviceName, Mapping[TaskName, int]] = {}  # samples of accepted updates


@dataclass(slots=True)
class FederationFigures:
    """Observer that keeps figures of every closed cycle and counts outcomes."""

    federation: Federation
    cycles: list[CycleFigures] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    _volumes: dict[DeviceName, Mapping[str, int]] = field(default_factory=dict)
    _orders: dict[DeviceName, StartWork] = field(default_factory=dict)
    _reports: dict[DeviceName, tuple[float, tuple[TaskResult, ...]]] = field(default_factory=dict)
    _started_at: float = 0.0

    def __call__(self, record: Record) -> None:
        refused = {(each.device, each.task) for each in record.refused}
        for fact in record.facts:
            if isinstance(fact, DeviceJoined):
                self._volumes[fact.device] = fact.volumes
            elif isinstance(fact, WorkReported):
                good = tuple([each for each in fact.results if (fact.device, each.task) not in refused])
                self.outcomes[Outcome.ACCEPTED] += len(good)
                if good:
                    self._reports[fact.device] = (record.at, good)
        self.outcomes.update([each.outcome for each in record.refused])
        for order in record.orders:
            if isinstance(order, CloseCycle):
                self.cycles.append(self._figures(order, record.at))
                self._orders.clear()
                self._reports.clear()
            elif isinstance(order, StartWork):
                if not self._orders:
                    self._started_at = record.at
                self._orders[order.device] = order

    def _figures(self, closing: CloseCycle, at: float) -> CycleFigures:
        idle = {device: at - reported_at for device, (reported_at, _) in self._reports.items()}
        results = [result for _, good in self._reports.values() for result in good]
        residuals = [self._mismatch(device, good) for device, (_, good) in self._reports.items()]
        return CycleFigures(
            closing.cycle,
            at - self._started_at,
            idle,
            sum(residuals) / max(len(residuals), 1),
            sum([result.samples for result in results]),
            2 * sum([result.num_bytes for result in results]),
            self._started_at,
            closing.missing,
            {device: {each.task: each.samples for each in good} for device, (_, good) in self._reports.items()},
        )

    def _mismatch(self, device: DeviceName, results: tuple[TaskResult, ...]) -> float:
        weights = {task.name: task.weight for task in self.federation.tasks}
        held = self._volumes.get(device, {})
        volumes = [weights[result.task] * max(held.get(result.task, 0), 0.5) for result in results]
        return mismatch(volumes, [result.samples for result in results])

    @property
    def idle_part(self) -> float:
        """The part of all devices' time in cycles that they spent waiting for others."""
        waited = sum([sum(each.idle.values()) for each in self.cycles])
        return waited / max(sum([each.seconds * len(each.idle) for each in self.cycles]), 1e-12)

    @property
    def idle_s(self) -> float:
        return sum([sum(each.idle.values()) for each in self.cycles])

    @property
    def mean_mismatch(self) -> float:
        return sum([each.mismatch for each in self.cycles]) / max(len(self.cycles), 1)
