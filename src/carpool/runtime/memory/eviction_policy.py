"""Eviction policy: selects the jobs whose state and scratch memory stay on a device under a cap; pure.

A job's memory has two parts. Its *state* (weights, buffers, optimizer) has to be copied out before it can be let go,
and copied in again; its *scratch* (activations, recorded with its graphs) is worth nothing between two turns. The rule
is Hare's speculative memory: what computes now has its memory, then those who come next, in their order,
then those who computed last, the latest first, as long as they fit. So the coldest goes first, and never more is on
the device than it has room for.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

CUDA_CONTEXT_BYTES = 1 << 30  # bytes: what a process takes for CUDA itself and for the code of its libraries

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes that a job takes on the device."""

    state: int
    scratch: int = 0
    fixed: int = 0  # from which it cannot part while its process lives

    @property
    def whole(self) -> int:
        """What it takes while it computes, beside what it never parts from."""
        return self.state + self.scratch


@dataclass(frozen=True, slots=True)
class Residents(Generic[K]):
    """Who is to have what on the device."""

    states: frozenset[K]
    scratches: frozenset[K]  # a part of ``states``

    def taken(self, needs: Mapping[K, MemoryNeed]) -> int:
        """Bytes that they take, fixed ones of all jobs included."""
        fixed = sum(need.fixed for need in needs.values())
        states, scratches = (needs[k].state for k in self.states), (needs[k].scratch for k in self.scratches)
        return fixed + sum(states) + sum(scratches)


def plan_residents(
    capacity: int,
    needs: Mapping[K, MemoryNeed],
    now: Residents[K],
    *,
    running: K | None,
    coming: Sequence[K],
    recent: Sequence[K],
) -> Residents[K]:
    """Who is to be on the device; those of ``coming`` who are missing do not fit beside what computes now.

    ``coming`` and ``recent`` name jobs in their order, the next and the latest one first. Nobody is brought in but
    those who come. Whoever comes first is brought in wholly; where it would fit only into the scratch of what computes
    now, its state is brought in and its scratch has to wait.
    """
    room = capacity - sum(need.fixed for need in needs.values())
    states: set[K] = set()
    scratches: set[K] = set()
    if running is not None:
        states.add(running)
        scratches.add(running)
        room -= needs[running].whole
    first = next((who for who in coming if who != running), None)
    if first is not None and needs[first].state <= room:
        states.add(first)
        room -= needs[first].state
        if needs[first].scratch <= room:
            scratches.add(first)
            room -= needs[first].scratch
    for who in (*coming, *recent):
        if who not in states and (who in now.states or (who in coming and who != first)) and needs[who].state <= room:
            states.add(who)
            room -= needs[who].state
    for who in (*coming, *recent):  # its own scratch is the cheapest to have again, so it is kept last
        if who in states and who not in scratches and who in now.scratches and needs[who].scratch <= room:
            scratches.add(who)
            room -= needs[who].scratch
    return Residents(frozenset(states), frozenset(scratches))
