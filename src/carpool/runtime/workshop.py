"""What the parts of an executor have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from carpool.runtime.devices import LocalDevice
from carpool.runtime.gate import Gate
from carpool.runtime.intake import Intake
from carpool.runtime.reports import Report
from carpool.runtime.rota import Rota
from carpool.runtime.staff import Staff
from carpool.runtime.wire import ExecutorOptions


@dataclass(frozen=True, slots=True)
class Workshop:
    """A node's devices, the jobs in hand, and who sees to processes, lanes and turns."""

    devices: Mapping[int, LocalDevice]
    options: ExecutorOptions
    jobs: Intake
    staff: Staff
    gate: Gate
    rota: Rota
    report: Callable[[Report], None]
    clock: Callable[[], float]
