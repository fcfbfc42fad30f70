"""What an executor has in hand when somebody claims it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from carpool.core.model import JobId
from carpool.runtime.devices import LocalDevice
from carpool.runtime.wire import devices_from_json


@dataclass(frozen=True, slots=True)
class Standing:
    """One job that was introduced."""

    generation: int  # of the newest order that it has heard of
    steps: int  # done
    is_still: bool  # no worker of it computes
    is_over: bool  # its end has been reported


@dataclass(frozen=True, slots=True)
class Inventory:
    """Which executor it is, where, and how its jobs stand."""

    pid: int
    life: int  # the epoch in which it was first claimed: another life, other numbers on its reports
    devices: tuple[LocalDevice, ...]
    jobs: Mapping[JobId, Standing]


def inventory_to_json(inventory: Inventory) -> dict[str, Any]:
    """An inventory as plain JSON values."""
    return asdict(inventory)


def inventory_from_json(value: Mapping[str, Any]) -> Inventory:
    """The inverse of `inventory_to_json`."""
    jobs = {JobId(job): Standing(**standing) for job, standing in value["jobs"].items()}
    return Inventory(value["pid"], value["life"], tuple(devices_from_json(value["devices"])), jobs)
