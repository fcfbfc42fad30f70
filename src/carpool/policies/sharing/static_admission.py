"""Static sharing: equal MPS percentages, and admission by interference estimated from SM and memory use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import ClassVar

from carpool.core.draft import Draft
from carpool.core.errors import InputError, UnknownName
from carpool.core.estimates import Estimator
from carpool.core.model import Allocation, DeviceId, Job, JobSpec, Kind
from carpool.core.policy import Plan, Policy, Snapshot
from carpool.core.topology import Neighbour, Placement
from carpool.policies.registry import register
from carpool.policies.sharing.shareable_devices import ShareableDevices, pick_devices, start_alone, start_jobs

_FITS = ("emptiest", "packed")


@register("mps-equal")
@dataclass(frozen=True, slots=True)
class MpsEqual(Policy):
    """First fit by memory into `slots` equal slots per device, in order of submission; jobs are never moved.

    A slot is a fraction 1/slots of the device even if other slots are empty: MPS percentages are fixed when a
    client starts. Jobs without a slot wait; later ones may pass them. Policy re-implementation.
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
        if not view.waiting:
            return Plan.NOTHING
        draft = Draft(view)
        rooms = ShareableDevices(draft, self.slots)
        alone = partial(start_alone, draft, fraction=1.0 / self.slots)
        join = partial(self._join, draft, rooms)
        ways = (join, alone) if self.fit == "packed" else (alone, join)
        placed = sum(start_jobs(draft, rooms, draft.waiting(), *ways))
        return draft.finish(f"started {placed} in slots of 1/{self.slots}") if placed else Plan.NOTHING

    def _join(self, draft: Draft, rooms: ShareableDevices, job: Job) -> Allocation | None:
        fraction = 1.0 / self.slots
        devices = pick_devices(draft, job, rooms.open_to(job, fraction, fullest_first=self.fit == "packed"))
        if devices is None:
            return None
        allocation = Allocation.of(*devices, fraction=fraction)
        draft.assign(job, allocation)
        return allocation


@register("kernel-est")
@dataclass(frozen=True, slots=True)
class KernelEst(Policy):
    """Start jobs on free devices, else co-locate them where no predicted slowdown exceeds a limit.

    With S and B the sums of the other residents' SM and memory-bandwidth use and s, b the job's own:

        slowdown = 1 + sm·S + memory·B + sm_sm·s·S + memory_memory·b·B

    Where the estimator does not know use, slowdown = 1 + Σ_j (rate alone / rate beside j − 1). Jobs share without
    caps and are never moved. Reconstructed from descriptions; the original source is not available. The default
    coefficients are a non-negative least-squares fit of 6,000 random groups of two to four in a parametric world
    (mean error 2.4 %).
    """

    shares_devices: ClassVar[bool] = True
    max_virtual: ClassVar[float] = 16.0

    max_slowdown: float = 1.75  # of any resident; at 2 two jobs might as well take turns
    most: int = 4  # residents of one device
    sm: float = 0.06
    memory: float = 1.89
    sm_sm: float = 0.09
    memory_memory: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.most <= self.max_virtual:
            raise InputError(f"most is {self.most}", way_out=f"Give a number from 1 to {self.max_virtual:.0f}.")
        if self.max_slowdown < 1.0:
            raise InputError(f"max_slowdown is {self.max_slowdown}", way_out="Give a number of at least 1.")

    def plan(self, view: Snapshot) -> Plan:
        if not view.waiting:
            return Plan.NOTHING
        draft = Draft(view)
        rooms = ShareableDevices(draft, self.most)
        ways = (partial(start_alone, draft), partial(self._join, draft, rooms))
        alone, together = start_jobs(draft, rooms, draft.waiting(), *ways)
        if not alone + together:
            return Plan.NOTHING
        return draft.finish(f"started {alone} alone and {together} where slowdown stays below {self.max_slowdown:g}")

    def _join(self, draft: Draft, rooms: ShareableDevices, job: Job) -> Allocation | None:
        harms = [(self._harm(draft, job, device), device) for device in rooms.open_to(job)]
        bearable = sorted([(sum(harm), device) for harm, device in harms if max(harm) <= self.max_slowdown])
        devices = pick_devices(draft, job, [device for _, device in bearable])
        if devices is None:
            return None
        allocation = Allocation.of(*devices)
        draft.assign(job, allocation)
        return allocation

    def _harm(self, draft: Draft, job: Job, device: DeviceId) -> list[float]:
        """Predicted slowdown of every job on a device, including the new one."""
        jobs = draft.view.jobs
        specs = [jobs[resident.job].spec for resident in draft.occupancy.residents(device)]
        return self.slowdowns(draft.view.estimates, [*specs, job.spec], draft.view.cluster.kind_of(device))

    def slowdowns(self, estimates: Estimator, specs: Sequence[JobSpec], kind: Kind) -> list[float]:
        uses = [use for spec in specs if (use := estimates.use(spec, kind)) is not None]
        if len(uses) < len(specs):
            return [
                _from_pairs(estimates, spec, [other for other in specs if other is not spec], kind) for spec in specs
            ]
        all_sm = sum([use.sm for use in uses])
        all_memory = sum([use.memory_bw for use in uses])
        return [
            1.0
            + (self.sm + self.sm_sm * use.sm) * (all_sm - use.sm)
            + (self.memory + self.memory_memory * use.memory_bw) * (all_memory - use.memory_bw)
            for use in uses
        ]


def _from_pairs(estimates: Estimator, spec: JobSpec, others: Sequence[JobSpec], kind: Kind) -> float:
    """The sum of pairwise slowdowns, from rates alone and beside one neighbour."""
    groups = ((kind, spec.devices),)
    alone = estimates.rate(spec, Placement(groups)).mean
    slowdown = 1.0
    for other in others:
        shared = estimates.rate(spec, Placement(groups, neighbours=(Neighbour(other),))).mean
        slowdown += alone / shared - 1.0 if shared > 0.0 else inf
    return slowdown
