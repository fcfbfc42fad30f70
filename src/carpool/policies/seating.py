"""Which devices a job gets once it is decided how many of which kind: near where it was, on one node, else spread."""

from __future__ import annotations

from carpool.core.draft import Draft
from carpool.core.model import Allocation, Job, Share
from carpool.core.placing import Runs, consolidated, joined, lowest, pooled, spread
from carpool.policies.options import Offer


def seat(draft: Draft, job: Job, offer: Offer, *, apart: bool = False, batch_size: int = 0) -> bool:
    """Let a job that holds nothing in the draft have the devices of an offer; False, with nothing changed, if it fits not.

    `apart` allows more nodes than needed.
    """
    runs = _find(draft, job, offer, apart=apart)
    if runs is None:
        return False
    fraction = job.lane[0] if job.lane else 1.0
    draft.assign(job, Allocation(tuple([Share(run, fraction) for run in runs]), batch_size))
    return True


def _find(draft: Draft, job: Job, offer: Offer, *, apart: bool) -> Runs | None:
    free = draft.occupancy
    if any(free.free_devices.get(kind, 0) < count for kind, count in offer.groups):
        return None
    if len(offer.groups) > 1:
        runs = [run for kind, count in offer.groups for run in pooled(free, kind, count) or ()]
        return joined(runs)
    (kind, count) = offer.groups[0]
    near = _near(draft, job, offer)
    if near is not None:
        return near
    runs_found = consolidated(free, kind, count)
    return spread(free, kind, count) if runs_found is None and apart else runs_found


def _near(draft: Draft, job: Job, offer: Offer) -> Runs | None:
    """On the node where the job has most devices now, its own ones first, if that node has room for all."""
    held, cluster = job.desired, draft.view.cluster
    (kind, count) = offer.groups[0]
    if held is None or count > cluster.node_size[kind]:
        return None
    mine: dict[int, list[int]] = {}
    for device in held.devices():
        node, bank = cluster.spot(device)
        if bank.kind == kind and draft.occupancy.free_mask(node.id) >> (device - node.devices.start) & 1:
            mine.setdefault(node.id, []).append(device)
    for node_id in sorted(mine, key=lambda node_id: (-len(mine[node_id]), node_id)):
        own = mine[node_id][:count]
        if len(own) == count:
            return joined([range(device, device + 1) for device in own])
        node = cluster.nodes[node_id]
        mask = draft.occupancy.free_mask(node_id)
        there = sum(
            [(mask >> (device - node.devices.start)) & 1 for b in node.banks if b.kind == kind for device in b.devices]
        )
        if there >= count:
            every = [device for run in lowest(draft.occupancy, node, kind, there) for device in run]
            others = [device for device in every if device not in own]
            return joined([range(device, device + 1) for device in own + others[: count - len(own)]])
    return None
