"""Placement of chosen options on devices: largest first, near the previous devices and on one node."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from carpool.core.draft import Draft
from carpool.core.model import Allocation, Job, Kind, Share
from carpool.core.placement import Runs, consolidated, emptiest, linked, merge_runs, pooled
from carpool.policies.market.colocation_groups import ColocationGroup, ColocationGroups
from carpool.policies.market.knapsack import NONE, Choices
from carpool.policies.market.menu import Menu, rate_on_nodes, rate_when_spread, shape_of
from carpool.policies.market.policy_memory import Offer

_NEARLY = 0.9  # above this part of the best rate, no move to other nodes


def place_all(draft: Draft, menu: Menu, groups: ColocationGroups, choice: Choices) -> None:
    """Place every group on the offer chosen for it, else on the best one that fits."""
    movers: list[tuple[int, int]] = []
    runs = menu.held != NONE
    if len(groups) != len(menu.jobs):
        runs = np.array([bool(runs[list(groups.rows(place))].any()) for place in range(len(groups))])
    stays = (choice == groups.stays_at) & ~(runs & (choice == NONE))
    may_tune = draft.view.estimates.tunes_batches or menu.batches.any()
    changing = ~stays | (choice != NONE) if may_tune else ~stays  # skips jobs that keep waiting
    for place in np.flatnonzero(changing).tolist():
        if stays[place]:
            _tune(draft, menu, groups.rows(place))
            continue
        for row in groups.rows(place):
            draft.release(menu.jobs[row])
        if choice[place] != NONE:
            movers.append((place, int(choice[place])))
    movers.sort(key=lambda mover: (-menu.offers[mover[1]].width, -groups.values[mover], mover[0]))
    for place, option in movers:
        _place_or_next_best(draft, menu, groups[place], option)


def _place_or_next_best(draft: Draft, menu: Menu, group: ColocationGroup, wanted: int) -> None:
    """Place a group on its offer on as few nodes as possible, else on the best offer that fits."""
    if _place_group(draft, menu, group, wanted, apart=False):
        return
    free, offers, values = draft.occupancy.free_devices, menu.offers, group.values
    able: list[int] = np.flatnonzero(values > 0.0).tolist()
    fits = [option for option in able if all(free.get(kind, 0) >= count for kind, count in offers[option].groups)]
    for option in sorted(fits, key=lambda option: -values[option]):
        slower = _spread_ratio(draft, menu, group, option)
        smaller = max([values[other] for other in fits if offers[other].width < offers[option].width], default=0.0)
        apart = values[option] * slower >= smaller
        if _place_group(draft, menu, group, option, apart=apart) or (
            apart and _place_group(draft, menu, group, option, apart=False)
        ):
            return
    if menu.cluster.links and _place_group(draft, menu, group, wanted, apart=True, is_last=True):
        return  # a slow link is better than no devices
    if menu.cluster.max_nodes and fits:  # the draft refuses it, and the scheduler has the others planned without it
        least = min(fits, key=lambda option: offers[option].width)
        _place_group(draft, menu, group, least, apart=True, is_last=True)


def _spread_ratio(draft: Draft, menu: Menu, group: ColocationGroup, option: int) -> float:
    """The part of its rate a group keeps on more nodes than necessary."""
    row = group.rows[0]
    return float(rate_when_spread(draft.view, menu.jobs[row], menu.offers[option]).rate / menu.rates[row, option])


def _pays(draft: Draft, menu: Menu, group: ColocationGroup, option: int, runs: Runs) -> bool:
    """Whether an offer on these devices, over the links between them, is worth more than any smaller one."""
    held = Allocation.exclusive(runs)
    if not menu.cluster.links or len(menu.cluster.nodes_of(held)) == 1:
        return True
    row, free, offers = group.rows[0], draft.occupancy.free_devices, menu.offers
    slower = rate_on_nodes(draft.view, menu.jobs[row], held) / menu.rates[row, option]
    smaller = [
        value
        for value, offer in zip(group.values.tolist(), offers, strict=True)
        if offer.width < offers[option].width and all(free.get(kind, 0) >= count for kind, count in offer.groups)
    ]
    return bool(group.values[option] * slower >= max(smaller, default=0.0))


def _place_group(
    draft: Draft, menu: Menu, group: ColocationGroup, option: int, *, apart: bool, is_last: bool = False
) -> bool:
    """Assign the devices of an offer to all jobs of a group; False, with nothing changed, if they are not free.

    Unless there is no other (`is_last`), an offer is refused on too many nodes for the job, and over a slow link where
    smaller ones are worth more.
    """
    first = max(group.rows, key=lambda row: menu.held[row] == option)
    job, offer = menu.jobs[first], menu.offers[option]
    runs = _find(draft, job, offer, apart=apart)
    if runs is None:
        return False
    if not is_last and (_are_on_too_many_nodes(draft, job, runs) or not _pays(draft, menu, group, option, runs)):
        return False
    batches = group.batches.get(option) or [int(menu.batches[row, option]) for row in group.rows]
    for row, batch, share in zip(group.rows, batches, group.fractions(option), strict=True):
        member = menu.jobs[row]
        fraction = member.lane[0] if member.lane else share
        draft.assign(member, Allocation(tuple([Share(run, fraction) for run in runs]), batch))
    _tune(draft, menu, group.rows)
    return True


def _tune(draft: Draft, menu: Menu, rows: Sequence[int]) -> None:
    """Give a job without neighbours the best batch size for its devices, if it may be tuned."""
    if len(rows) > 1:
        return
    row = rows[0]
    job = menu.jobs[row]
    held = draft.holding(job)
    if held is None or not (held.batch_size or job.spec.batch_range):
        return
    has = held.batch_size or draft.view.estimates.own_batch(job.spec)
    shape = shape_of(menu.cluster, held)
    if menu.is_tight(held, shape):
        batch = int(menu.batches[row, menu.offers.index(shape)])
    else:
        batch = rate_when_spread(draft.view, job, shape).batch_size
    if batch and batch != has:
        draft.assign(job, held._replace(batch_size=batch))


def _are_on_too_many_nodes(draft: Draft, job: Job, runs: Runs) -> bool:
    cluster = draft.view.cluster
    most = cluster.nodes_for(job.spec)
    return bool(most) and len(cluster.nodes_of(Allocation.exclusive(runs))) > most


def _find(draft: Draft, job: Job, offer: Offer, *, apart: bool) -> Runs | None:
    """Free devices: where the job was, on one node, or, if `apart`, on several."""
    free = draft.occupancy
    if any(free.free_devices.get(kind, 0) < count for kind, count in offer.groups):
        return None
    if len(offer.groups) > 1:
        return merge_runs([run for kind, count in offer.groups for run in pooled(free, kind, count) or ()])
    kind, count = offer.groups[0]
    runs = _near(draft, job, offer) or consolidated(free, kind, count)
    runs = emptiest(free, kind, count) if runs is None and apart else runs
    if runs is None or not free.cluster.links or len(free.cluster.nodes_of(Allocation.exclusive(runs))) == 1:
        return runs
    return _best_linked(draft, job, kind, count, runs)


def _best_linked(draft: Draft, job: Job, kind: Kind, count: int, runs: Runs) -> Runs:
    """The devices on several nodes with which the job is fastest; those it holds, if others are hardly faster."""
    free, held = draft.occupancy, job.desired
    found = [runs, *linked(free, kind, count, free.cluster.nodes_for(job.spec))]
    rates = [rate_on_nodes(draft.view, job, Allocation.exclusive(each)) for each in found]
    paths = [free.cluster.path(free.cluster.nodes_of(Allocation.exclusive(each))) for each in found]
    best = max(range(len(found)), key=lambda place: (rates[place], paths[place] or (0.0, 0.0)))  # unknown: fastest link
    if held is not None and held.num_devices == count and all(free.is_free(device) for device in held.devices()):
        own = tuple([share.devices for share in held.shares])
        if rate_on_nodes(draft.view, job, Allocation.exclusive(own)) >= _NEARLY * rates[best]:
            return own
    return found[best]


def _near(draft: Draft, job: Job, offer: Offer) -> Runs | None:
    """Devices of the node where the job holds most, its own first, if that node has enough."""
    held, cluster = job.desired, draft.view.cluster
    kind, count = offer.groups[0]
    if held is None or count > cluster.node_size[kind]:
        return None
    mine: dict[int, list[int]] = {}
    for device in held.devices():
        node, bank = cluster.spot(device)
        if bank.kind == kind and draft.occupancy.free_mask(node.id) >> (device - node.devices.start) & 1:
            mine.setdefault(node.id, []).append(device)
    for node_id in sorted(mine, key=lambda node_id: (-len(mine[node_id]), node_id)):
        node, own = cluster.nodes[node_id], mine[node_id][:count]
        mask, first = draft.occupancy.free_mask(node_id), node.devices.start
        free = [d for bank in node.banks if bank.kind == kind for d in bank.devices if mask >> (d - first) & 1]
        if len(free) >= count:
            others = [device for device in free if device not in own]
            return merge_runs([range(device, device + 1) for device in own + others[: count - len(own)]])
    return None
