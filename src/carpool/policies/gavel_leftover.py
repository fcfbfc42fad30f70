"""How Gavel's simulator chooses kinds under plain `fifo`, slip included; only for reproducing its listed figures.

Its code means to draw one of the kinds with room at random. But the name of the kind is read from a variable that a
loop before has left at the last kind by name with any room, whether the gang fits there or not; the drawn number only
strikes a kind off the list. So kinds are overbooked, and the jobs on them take turns. Placements are kept while a job
lives; a job that ends hands its kind to the head of the queue if that fits the room counted up to then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from carpool.core.model import Job, JobId, Kind

Rates = Sequence[tuple[Job, Mapping[Kind, float]]]


def leftover_kinds(
    rates: Rates, capacity: Mapping[Kind, int], memory: Mapping[str, Any], seed: int
) -> tuple[dict[JobId, Kind], dict[str, Any]]:
    """The kind of each job that has one, and what the next call needs: the kinds, and the sizes of all draws so far.

    `rates` is in order of arrival. The draws are made again each time, so that one stream lasts for the whole run.
    """
    random = Random(seed)
    draws: list[int] = list(memory.get("draws", ()))
    for size in draws:
        random.randrange(size)
    there = {job.id: (job, speeds) for job, speeds in rates}
    held: dict[JobId, Kind] = dict(memory.get("kinds", {}))
    order: list[JobId] = list(memory.get("order", ()))
    room = dict(capacity)
    queue = [entry for entry in rates if entry[0].id not in held]
    kinds = _inherited(there, held, order, room, queue)
    names = sorted([kind for kind in room if room[kind] > 0], key=str.casefold)
    while queue and names:
        job, speeds = queue.pop(0)
        width = job.spec.devices
        fitting = [place for place, kind in enumerate(names) if room[kind] >= width]
        if not fitting:
            break
        kind = names[-1]
        draws.append(len(fitting))
        struck = fitting[random.randrange(len(fitting))]
        if speeds[kind] > 0.0:
            kinds[job.id] = kind
            room[kind] -= width
            if room[kind] == 0:
                names.pop(struck)
    arrived = [job.id for job, _ in rates]
    return kinds, {"draws": draws, "kinds": kinds, "order": [job for job in arrived if job in kinds]}


def _inherited(
    there: Mapping[JobId, tuple[Job, Mapping[Kind, float]]],
    held: Mapping[JobId, Kind],
    order: Sequence[JobId],
    room: dict[Kind, int],
    queue: list[tuple[Job, Mapping[Kind, float]]],
) -> dict[JobId, Kind]:
    """Kinds that stay, and kinds of ended jobs that the head of the queue takes over; in order of arrival."""
    kinds: dict[JobId, Kind] = {}
    for old in order:
        kind = held[old]
        if old in there:
            kinds[old] = kind
            room[kind] -= there[old][0].spec.devices
        elif queue:
            job, speeds = queue[0]
            if job.spec.devices <= room.get(kind, 0) and speeds[kind] > 0.0:
                kinds[job.id] = kind
                room[kind] -= job.spec.devices
                queue.pop(0)
    return kinds
