"""How much more of devices was promised than there is of them."""

from __future__ import annotations

from carpool.core.model import Allocation


class Crowding:
    """Follows who holds what and adds up, over all devices, ∫ max(0, Σ fractions − 1) dt."""

    def __init__(self) -> None:
        self.excess_s = 0.0  # device-seconds, up to the last change of each device
        self._loads: dict[int, tuple[float, float]] = {}  # Σ fractions, since

    def change(self, at: float, before: Allocation | None, after: Allocation | None) -> None:
        """One job holds something else, or nothing, from now on."""
        if before is not None:
            self._add(at, before, -1.0)
        if after is not None:
            self._add(at, after, 1.0)

    def _add(self, at: float, allocation: Allocation, sign: float) -> None:
        for devices, fraction, _ in allocation.shares:
            for device in devices:
                load, since = self._loads.get(device, (0.0, at))
                if load > 1.0:
                    self.excess_s += (load - 1.0) * (at - since)
                self._loads[device] = (load + sign * fraction, at)
