"""Going on with a run that was interrupted: what its journal says, and the facts that make it true again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from carpool.core.errors import InputError
from carpool.core.messages import Fact, JobCancelled, JobSubmitted, NodeJoined, NodeLost
from carpool.core.model import JobId, JobSpec
from carpool.core.scheduler import Scheduler
from carpool.core.supplies import UNKNOWN, Supplies
from carpool.core.topology import Cluster, Node
from carpool.runtime.devices import NODE_NAME, LocalDevice, as_cluster
from carpool.runtime.jobfile import Listed

Banks = tuple[tuple[str, int, int], ...]  # (kind, number of devices, memory of each)


class Return(NamedTuple):
    """The machine as it comes back: under which name, with what, its devices numbered as the cluster numbers them."""

    name: str
    banks: Banks
    devices: tuple[LocalDevice, ...]
    supplies: Supplies = UNKNOWN

    def fact(self) -> NodeJoined:
        """That it has come back."""
        return NodeJoined(self.name, self.banks, self.supplies if any(self.supplies) else ())


def check_unchanged(before: Sequence[Listed], now: Sequence[Listed], over: frozenset[JobId]) -> None:
    """InputError where a job that still has to run is not the one that was begun."""
    begun = {spec.id: (spec, program) for spec, program in before}
    for spec, program in now:
        if spec.id in over or spec.id not in begun:
            continue
        old_spec, old_program = begun[spec.id]
        if program != old_program or _lasting(spec) != _lasting(old_spec):
            raise InputError(
                f"job {spec.id!r} is not what it was when the run began",
                way_out="Put it back as it was, give it another name, or begin a new run without --resume.",
            )


def _lasting(spec: JobSpec) -> JobSpec:
    """What may not change of a job: not how it stands to others, nor its deadline, which comes nearer by itself."""
    return replace(spec, weight=1.0, priority=0, deadline_s=0.0, after=(), array="", at_most=0)


def facts_of_return(scheduler: Scheduler, jobs: Sequence[Listed], back: Return) -> list[Fact]:
    """What has happened since the last record: the machine went away and came back, jobs were dropped and added."""
    lost = scheduler.snapshot().occupancy.lost
    facts: list[Fact] = [NodeLost(node.id) for node in scheduler.cluster.nodes if node.id not in lost]
    listed = {spec.id for spec, _ in jobs}
    facts += [JobCancelled(job) for job in scheduler.jobs if job not in listed]
    facts.append(back.fact())
    facts += [
        JobSubmitted(spec) for spec, _ in jobs if spec.id not in scheduler.jobs and scheduler.outcome(spec.id) is None
    ]
    return facts


def returned(cluster: Cluster, devices: Sequence[LocalDevice], supplies: Supplies = UNKNOWN) -> Return:
    """How the machine comes back into a cluster: with other devices than ever before it is another node."""
    banks = _banks(as_cluster(devices).nodes[0])
    for node in reversed(cluster.nodes):
        if _banks(node) == banks:
            return Return(node.name, banks, _numbered(devices, node.devices.start), supplies)
    name = f"{NODE_NAME}-{len(cluster.nodes) + 1}"
    return Return(name, banks, _numbered(devices, cluster.num_devices), supplies)


def _banks(node: Node) -> Banks:
    return tuple((str(bank.kind), len(bank.devices), bank.memory_bytes) for bank in node.banks)


def _numbered(devices: Sequence[LocalDevice], first: int) -> tuple[LocalDevice, ...]:
    return tuple(replace(device, id=first + place) for place, device in enumerate(devices))
