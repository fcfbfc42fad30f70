"""Static equal percentages: every job gets the same fixed slot of a device and stays in it to the end."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from carpool.core.draft import Draft
from carpool.core.errors import InputError, UnknownName
from carpool.core.model import Allocation, Job
from carpool.core.policy import Plan, Policy, Snapshot
from carpool.policies.registry import register
from carpool.policies.sharing import Rooms, gather, start_alone, start_by

_FITS = ("emptiest", "packed")


@register("mps-equal")
@dataclass(frozen=True, slots=True)
class MpsEqual(Policy):
    """First fit by memory into `slots` equal slots of each device, in order of submission; nobody is ever moved.

    A slot is a fraction 1/slots of the device whether or not the other slots are taken: MPS percentages bind when a
    client starts. Jobs that find no slot wait; later ones may pass them. Policy re-implementation.
    """

    shares_devices: ClassVar[bool] = True

    slots: int = 3
    fit: str = "emptiest"  # empty devices first; "packed": a device is filled before the next is opened

    def __post_init__(self) -> None:
        if self.slots < 1:
            raise InputError(f"slots is {self.slots}", way_out="Give a whole number of at least 1.")
        if self.fit not in _FITS:
            raise UnknownName("fit", self.fit, _FITS)

    def plan(self, view: Snapshot) -> Plan:
        """Put waiting jobs into open slots."""
        if not view.waiting:
            return Plan.NOTHING
        draft = Draft(view)
        rooms = Rooms(draft, self.slots)
        alone = partial(start_alone, draft, fraction=1.0 / self.slots)
        join = partial(self._join, draft, rooms)
        ways = (join, alone) if self.fit == "packed" else (alone, join)
        placed = sum(start_by(draft, rooms, draft.waiting(), *ways))
        return draft.finish(f"{placed} into slots of 1/{self.slots}") if placed else Plan.NOTHING

    def _join(self, draft: Draft, rooms: Rooms, job: Job) -> Allocation | None:
        fraction = 1.0 / self.slots
        devices = gather(draft, job, rooms.open_to(job, fraction, fullest_first=self.fit == "packed"))
        if devices is None:
            return None
        allocation = Allocation.of(*devices, fraction=fraction)
        draft.assign(job, allocation)
        return allocation
