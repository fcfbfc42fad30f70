"""Going on with a run that was interrupted: what its journal says, and the facts that make it true again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from carpool.core.errors import InputError
from carpool.core.messages import Fact, JobCancelled, JobSubmitted, NodeJoined, NodeLost
from carpool.core.model import JobId
from carpool.core.scheduler import Scheduler
from carpool.core.topology import Cluster
from carpool.runtime.devices import NODE_NAME, LocalDevice, as_cluster
from carpool.runtime.jobfile import Listed


def check_unchanged(before: Sequence[Listed], now: Sequence[Listed], over: frozenset[JobId]) -> None:
    """InputError where a job that still has to run is not the one that was begun."""
    begun = {spec.id: (spec, program) for spec, program in before}
    for spec, program in now:
        if spec.id in over or spec.id not in begun:
            continue
        old_spec, old_program = begun[spec.id]
        if program != old_program or replace(spec, weight=1.0, after=()) != replace(old_spec, weight=1.0, after=()):
            raise InputError(
                f"job {spec.id!r} is not what it was when the run began",
                way_out="Put it back as it was, give it another name, or begin a new run without --resume.",
            )


def facts_of_return(scheduler: Scheduler, jobs: Sequence[Listed], node: str, devices: Sequence[LocalDevice]) -> list[Fact]:
    """What has happened since the last record: the machine went away and came back, jobs were dropped and added.

    A machine that comes back with other devices is another node.
    """
    facts: list[Fact] = [
        NodeLost(node_.id) for node_ in scheduler.cluster.nodes if node_.id not in scheduler.snapshot().occupancy.lost
    ]
    listed = {spec.id for spec, _ in jobs}
    facts += [JobCancelled(job) for job in scheduler.jobs if job not in listed]
    banks = tuple((str(bank.kind), len(bank.devices), bank.memory_bytes) for bank in as_cluster(devices).nodes[0].banks)
    facts.append(NodeJoined(node, banks))
    known = {*scheduler.jobs, *(spec.id for spec, _ in jobs if scheduler.outcome(spec.id) is not None)}
    facts += [JobSubmitted(spec) for spec, _ in jobs if spec.id not in known]
    return facts


def returned_as(cluster: Cluster, devices: Sequence[LocalDevice]) -> tuple[str, list[LocalDevice]]:
    """Under which name the machine comes back, and its devices numbered as the cluster numbers them."""
    banks = [(bank.kind, len(bank.devices), bank.memory_bytes) for bank in as_cluster(devices).nodes[0].banks]
    for node in reversed(cluster.nodes):
        if [(bank.kind, len(bank.devices), bank.memory_bytes) for bank in node.banks] == banks:
            first = node.devices.start
            return node.name, [replace(device, id=first + place) for place, device in enumerate(devices)]
    first = cluster.num_devices
    name = f"{NODE_NAME}-{len(cluster.nodes) + 1}"
    return name, [replace(device, id=first + place) for place, device in enumerate(devices)]
