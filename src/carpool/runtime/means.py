"""What an executor works with that lies outside itself: the time, processes, and NVIDIA's service and driver."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from carpool.runtime.mps import Mps
from carpool.runtime.outsiders import Ask
from carpool.runtime.staff import Staff, StaffEar


@dataclass(frozen=True, slots=True)
class Means:
    """An executor's means, real ones unless others are given."""

    clock: Callable[[], float] = time.monotonic
    hire: Callable[[StaffEar, Callable[[], float]], Staff] = Staff
    make_mps: Callable[[], Mps] = Mps
    ask: Ask | None = None  # who computes on a GPU; None: the driver is asked
