"""Hare's printed rule per task, computed: each part of a step goes to the GPU with the earliest available time.

Tasks are taken in the order of their jobs in the relaxation (M + p/2, with all arrivals known), then of their steps. A
step's parts become ready when the step before has ended (relaxed fixed-scale synchronisation: they need not run at the
same instant). Devices differ in speed, which the rule does not consider. Of the printed rule nothing is left out but
the order within a job, which the text takes from a relaxation over all tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import numpy as np

from carpool.policies.hare.relaxation import Demand, solve


class TaskJob(NamedTuple):
    """A job as its tasks."""

    weight: float
    at_s: float  # submitted
    steps: int
    parts: int  # of a step
    part_s: tuple[float, ...]  # seconds of a part on each device type


def ends(jobs: Sequence[TaskJob], devices: Sequence[int], switch_s: float = 0.0, intervals: int = 12) -> list[float]:
    """When each job ends; devices are given by the numbers of their types."""
    first = _order(jobs, devices, intervals)
    free = [(0.0, device) for device in range(len(devices))]  # with the time from which it is available
    heapify(free)
    last: list[int] = [-1] * len(devices)  # job of a device's last task
    ready: list[tuple[float, int, float, int]] = []  # place of its job, job, ready since, parts left
    coming = [(job.at_s, number, 0) for number, job in enumerate(jobs)]  # steps, with the time from which they may run
    heapify(coming)
    left, step_ends, found = [0] * len(jobs), [0.0] * len(jobs), [0.0] * len(jobs)
    while coming or ready:
        now = max(free[0][0], coming[0][0]) if not ready else free[0][0]
        while coming and coming[0][0] <= now:
            at, number, step = heappop(coming)
            left[number], step_ends[number] = jobs[number].parts, 0.0
            found[number] = at
            if step < jobs[number].steps:
                heappush(ready, (first[number], number, at, step))
        if not ready:
            continue
        _, number, since, step = ready[0]
        available, device = heappop(free)
        job = jobs[number]
        end = max(available, since) + job.part_s[devices[device]] + (switch_s if last[device] != number else 0.0)
        last[device] = number
        heappush(free, (end, device))
        left[number] -= 1
        step_ends[number] = max(step_ends[number], end)
        if not left[number]:
            heappop(ready)
            heappush(coming, (step_ends[number], number, step + 1))
    return found


def weighted_jct_s(jobs: Sequence[TaskJob], found: Sequence[float]) -> float:
    """Weighted mean of the times from submission to end."""
    taken = sum(job.weight * (end - job.at_s) for job, end in zip(jobs, found, strict=True))
    return taken / sum(job.weight for job in jobs)


def _order(jobs: Sequence[TaskJob], devices: Sequence[int], intervals: int) -> list[float]:
    """M + p/2 of each job."""
    kinds = range(max(devices) + 1)
    demand = Demand(
        speeds=np.array([[1.0 / job.part_s[kind] for kind in kinds] for job in jobs]),  # parts a second
        widths=np.array([float(min(job.parts, len(devices))) for job in jobs]),
        work=np.array([float(job.steps * job.parts) for job in jobs]),
        weights=np.array([job.weight for job in jobs]),
        capacity=np.array([float(devices.count(kind)) for kind in kinds]),
        released=np.array([job.at_s for job in jobs]),
    )
    found = solve(demand, intervals)
    middle = found.mean_s + demand.shortest_s / 2.0 if found.optimal else demand.work / demand.weights
    return [float(each) for each in middle]
