"""Analytic world: rates follow a power of the device count and the speed of the device type."""

from __future__ import annotations

from dataclasses import dataclass, field

from carpool.core.estimates import Estimator
from carpool.core.model import JobSpec
from carpool.core.topology import Placement
from carpool.sim.worlds.base import Oracle, SteadyWorld


@dataclass(frozen=True, slots=True)
class ScalingWorld(SteadyWorld):
    """rate = (devices held / devices requested) ** exponent x speed of the slowest type held x share of it.

    Shares are scaled down where fractions on a device sum past one.
    """

    exponent: float = 1.0
    speeds: dict[str, float] = field(default_factory=dict)  # by kind; 1.0 for kinds not named
    start_s: float = 0.0  # standstill when a job starts
    resize_s: float = 0.0  # standstill when it moves or is resized

    def rate(self, spec: JobSpec, placement: Placement) -> float:
        speed = min([self.speeds.get(kind, 1.0) for kind, _ in placement.groups])
        rate = float((placement.num_devices / spec.devices) ** self.exponent) * speed
        return rate * placement.fraction / max(1.0, placement.load)

    def estimator(self) -> Estimator:
        return ScalingOracle(self)


@dataclass(frozen=True, slots=True)
class ScalingOracle(Oracle[ScalingWorld]):
    """Oracle of a `ScalingWorld`."""

    def similarity_key(self, spec: JobSpec) -> int:
        return spec.devices
