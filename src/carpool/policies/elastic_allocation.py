"""Elastic allocation: device counts that minimize weighted completion time, and resizing with few moves.

When a job ends, the others inherit its devices. Let jobs be ordered by remaining time, the longest first, and let v_j
be the cost of one unit of job j's work to all of them. Because the longest i jobs, once alone, share the devices as if
the others had never existed, v_j does not depend on shorter jobs, and the costs follow one after another:

    max over Σ k_j = N of Σ_{j ≤ i} v_j · s_j(k_j)  =  w_1 + … + w_i        for every i,

since the sum of weighted completion times falls by the weights of the active jobs every second. With
F_i(m) the left side for m devices this is v_i = min over k of (w_1 + … + w_i − F_{i−1}(N − k)) / s_i(k). The devices
then go where Σ v_j · s_j(k_j) is largest. For equal jobs with s(k) = k^p and equal weights that is heSRPT (Berg,
Vesilo, Harchol-Balter 2020), which is optimal; for different speed tables the same argument is exact while the order
holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from carpool.core.draft import Draft
from carpool.core.model import Allocation, Job, Kind
from carpool.core.placement import consolidated, emptiest

Floats = NDArray[np.float64]


def elastic_counts(speeds: Sequence[Floats], weights: Sequence[float], num_devices: int) -> list[int]:
    """Device counts of a batch of jobs ordered by remaining time, the longest first.

    ``speeds[j][k]`` is job j's rate on k devices, k = 0 … num_devices. Each table is replaced by its least concave
    majorant, so no job gets a count that a mixture of two others would beat.
    """
    best = np.zeros(num_devices + 1)  # F_{i-1}
    gains: list[Floats] = []
    total = 0.0
    for table, weight in zip(speeds, weights, strict=True):
        total += weight
        hull = concave(table)
        with np.errstate(divide="ignore"):
            worth = float(np.min((total - best[num_devices - 1 :: -1]) / hull[1:]))
        gains.append(worth * np.diff(hull))
        merged = np.sort(np.concatenate([np.diff(best), gains[-1]]))[::-1][:num_devices]
        best = np.concatenate([[0.0], np.cumsum(merged)])
    return _largest(gains, num_devices)


class DeviceSplit(NamedTuple):
    """Device counts of jobs, and the value of one second of any allocation: Σ v_j · s_j(k_j)."""

    counts: list[int]
    worth: list[float]  # v_j

    def value(self, speeds: Sequence[Floats], counts: Sequence[int]) -> float:
        """Value of one second with these device counts."""
        return sum(v * float(table[k]) for v, table, k in zip(self.worth, speeds, counts, strict=True))


def elastic_split(speeds: Sequence[Floats], weights: Sequence[float], num_devices: int) -> DeviceSplit:
    """Like `elastic_counts`, for tables as they are: neither concave nor monotone, no alternating between counts.

    F_i(m) = max over k of F_{i−1}(m − k) + v_i · s_i(k) is a knapsack of devices² steps per job.
    """
    best = np.zeros(num_devices + 1)  # F_{i-1}
    worth: list[float] = []
    total = 0.0
    for table, weight in zip(speeds, weights, strict=True):
        total += weight
        with np.errstate(divide="ignore"):
            v = float(np.min((total - best[num_devices - 1 :: -1]) / table[1:]))
        worth.append(v if np.isfinite(v) else 0.0)
        best = _options(best, worth[-1] * table).max(axis=1)
    return DeviceSplit(best_deal(speeds, worth, num_devices), worth)


def best_deal(speeds: Sequence[Floats], worth: Sequence[float], num_devices: int) -> list[int]:
    """The device counts with the largest Σ v_j · s_j(k_j); devices that do not help stay free."""
    best = np.zeros(num_devices + 1)
    chosen: list[NDArray[np.intp]] = []
    for table, v in zip(speeds, worth, strict=True):
        options = _options(best, v * table)
        best = options.max(axis=1)
        chosen.append((options > best[:, None] - 1e-12).argmax(axis=1))
    counts: list[int] = []
    for counted in reversed(chosen):
        counts.append(int(counted[num_devices]))
        num_devices -= counts[-1]
    return counts[::-1]


def _options(best: Floats, values: Floats) -> Floats:
    """[m, k]: value of m devices when one more job has k of them and the others the rest."""
    places = np.arange(len(best))
    left = places[:, None] - places[None, :]
    return np.where(left >= 0, best[np.maximum(left, 0)] + values[None, :], -np.inf)


def concave(table: Floats) -> Floats:
    """The least concave function that is nowhere below a table."""
    corners = [0]
    for k in range(1, len(table)):
        while len(corners) > 1 and _is_below(table, corners[-2], corners[-1], k):
            corners.pop()
        corners.append(k)
    return np.interp(np.arange(len(table)), corners, table[corners])


def _is_below(table: Floats, left: int, middle: int, right: int) -> bool:
    """Whether a point lies on or under the line between its neighbours."""
    rise = (table[right] - table[left]) * (middle - left)
    return bool((table[middle] - table[left]) * (right - left) <= rise)


def _largest(gains: Sequence[Floats], num_devices: int) -> list[int]:
    """How many of the largest gains belong to each job; ties go to the shorter job."""
    owner = np.concatenate([np.full(len(rows), job) for job, rows in enumerate(gains)])
    values = np.concatenate(gains)
    taken = np.lexsort((-owner, -values))[:num_devices]
    taken = taken[values[taken] > 0.0]
    return [int(count) for count in np.bincount(owner[taken], minlength=len(gains))]


def resize(draft: Draft, job: Job, kind: Kind, count: int) -> bool:
    """Assign `count` devices of one type, keeping as many of the job's current devices as possible.

    A growing job stays if its nodes have room, else moves to one node (or whole nodes) that fits it, else is spread
    over as few nodes as possible. False, with nothing changed, if there are too few devices.
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
    """Devices by node, fullest nodes first, so that a shrinking job leaves whole nodes."""
    nodes = {device: draft.view.cluster.node_of(device).id for device in devices}
    counts: dict[int, int] = {}
    for node in nodes.values():
        counts[node] = counts.get(node, 0) + 1
    return sorted(devices, key=lambda device: (-counts[nodes[device]], nodes[device], device))
