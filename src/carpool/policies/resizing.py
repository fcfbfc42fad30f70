"""Changing how many devices a job holds, with as little movement as possible."""

from __future__ import annotations

from carpool.core.draft import Draft
from carpool.core.model import Allocation, Job, Kind
from carpool.core.placing import consolidated, emptiest


def resize(draft: Draft, job: Job, kind: Kind, count: int) -> bool:
    """Let a job hold `count` devices of one kind: it keeps what it has of it, gives up or takes the difference.

    A job that grows stays where it is if its nodes have room, else it goes where the whole of it fits on one node (or
    whole nodes), else it is spread over as few nodes as possible. False, with nothing changed, if there are too few.
    """
    held = draft.holding(job)
    mine: list[int] = [] if held is None else [d for d in held.devices() if draft.view.cluster.kind_of(d) == kind]
    if held is not None and len(mine) == count == held.num_devices:
        return True
    if len(mine) >= count:
        draft.assign(job, Allocation.of(*_dense_first(draft, mine)[:count]))
        return True
    if held is not None:
        draft.release(job)
    free = [
        device
        for node in dict.fromkeys(draft.view.cluster.node_of(device) for device in mine)
        for device in node.devices
        if device not in mine
        and draft.occupancy.free_mask(node.id) >> (device - node.devices.start) & 1
        and draft.view.cluster.kind_of(device) == kind
    ]
    if mine and len(mine) + len(free) >= count:
        draft.assign(job, Allocation.of(*mine, *free[: count - len(mine)]))
        return True
    for rule in (consolidated, emptiest):
        if draft.place(job, count, kinds=(kind,), rule=rule):
            return True
    if held is not None:
        draft.assign(job, held)
    return False


def _dense_first(draft: Draft, devices: list[int]) -> list[int]:
    """Devices on the nodes where most of them are first, so that a shrinking job leaves nodes altogether."""
    nodes = {device: draft.view.cluster.node_of(device).id for device in devices}
    counts: dict[int, int] = {}
    for node in nodes.values():
        counts[node] = counts.get(node, 0) + 1
    return sorted(devices, key=lambda device: (-counts[nodes[device]], nodes[device], device))
