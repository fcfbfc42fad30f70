"""What an allocation must not be: more of a device, or of a job's range, than there is."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING

from carpool.core.errors import OutOfSupplies, Overbooked
from carpool.core.model import Allocation, JobSpec, Share
from carpool.core.topology import Bank, Node

if TYPE_CHECKING:
    from carpool.core.occupancy import Occupancy

Piece = tuple[Node, Bank, range, int, Share]  # part of a share inside one bank, and its bits in the node's mask

_EPSILON = 1e-9  # fractions are sums of decimal steps


def refuse_overbooking(
    there: Occupancy, spec: JobSpec, allocation: Allocation, pieces: Sequence[Piece], max_virtual: float
) -> None:
    """Overbooked unless an allocation, cut into pieces, fits what is left and what the job accepts."""
    count = allocation.num_devices
    if count != spec.devices and not spec.narrowest <= count <= spec.widest:
        raise Overbooked(f"job {spec.id!r} takes {spec.narrowest} to {spec.widest} devices, not {count}")
    if len(pieces) > 1:
        _refuse_twice(spec, pieces)
    for node, bank, run, bits, share in pieces:
        if not 0.0 < share.fraction <= 1.0:
            raise Overbooked(f"job {spec.id!r}: a fraction of {share.fraction} is not in (0, 1]")
        if node.id in there.lost:
            raise Overbooked(f"job {spec.id!r}: node {node.name!r} is lost")
        if there.free_mask(node.id) & bits != bits:  # some device has residents already, or is left to others
            if there.yielded and max_virtual < inf:  # what was allowed then is allowed
                _refuse_left(there, spec, run)
            _refuse_shared(there, spec, share, bank, run, max_virtual)
        elif 0 < bank.memory_bytes < spec.memory_bytes:
            raise Overbooked(_too_much_memory(spec, run.start, spec.memory_bytes, bank))


def _refuse_twice(spec: JobSpec, pieces: Sequence[Piece]) -> None:
    seen: dict[int, int] = {}
    for node, _, run, bits, _ in pieces:
        if seen.get(node.id, 0) & bits:
            raise Overbooked(f"job {spec.id!r} would hold devices {run.start} to {run.stop - 1} twice")
        seen[node.id] = seen.get(node.id, 0) | bits


def _refuse_left(there: Occupancy, spec: JobSpec, run: range) -> None:
    left = next((device for device in run if there.is_left(device)), None)
    if left is not None:
        raise OutOfSupplies(f"device {left} is left to others, who compute on it", spec.id)


def _refuse_shared(there: Occupancy, spec: JobSpec, share: Share, bank: Bank, run: range, max_virtual: float) -> None:
    for device in run:
        residents = there.residents(device)
        if any(resident.job == spec.id for resident in residents):
            raise Overbooked(f"job {spec.id!r} holds device {device} already")
        load = sum(resident.fraction for resident in residents) + share.fraction
        if load > max_virtual + _EPSILON:
            raise Overbooked(
                f"device {device} would carry {load:.3g} of at most {max_virtual:.3g} with job {spec.id!r}; "
                f"there already: {', '.join(r.job for r in residents)}"
            )
        memory = sum(resident.memory_bytes for resident in residents) + spec.memory_bytes
        if 0 < bank.memory_bytes < memory:
            raise Overbooked(_too_much_memory(spec, device, memory, bank))


def _too_much_memory(spec: JobSpec, device: int, memory: int, bank: Bank) -> str:
    needed, there = memory / (1 << 30), bank.memory_bytes / (1 << 30)
    return f"device {device} would hold {needed:.2f} GiB of its {there:.2f} GiB with job {spec.id!r}"
