"""Eviction policy: selects the jobs whose state and scratch memory stay on a device under a cap; pure.

A job's *state* (weights, buffers, optimizer) has to be copied out and in; its *scratch* (activations, captured with its
CUDA graphs) has no value between two turns. The rule is Hare's speculative memory: first the running job, then those
that come next, in order, then those that ran last, the latest first, as long as they fit. So the coldest is evicted
first.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

CUDA_CONTEXT_BYTES = 1 << 30  # memory of a process for CUDA and the code of its libraries

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes that a job takes on the device."""

    state: int
    scratch: int = 0
    fixed: int = 0  # held as long as its process lives

    @property
    def whole(self) -> int:
        """State and scratch: its memory while it runs, without the fixed part."""
        return self.state + self.scratch


@dataclass(frozen=True, slots=True)
class Residents(Generic[K]):
    """Jobs with memory on the device."""

    states: frozenset[K]
    scratches: frozenset[K]  # a subset of ``states``

    def taken(self, needs: Mapping[K, MemoryNeed]) -> int:
        """Bytes they take, with the fixed bytes of all jobs."""
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
    """The jobs to keep on the device; a job of ``coming`` that is not among them does not fit beside the running one.

    ``coming`` lists the next jobs first, ``recent`` the latest. Only ``coming`` jobs are brought in. The first of them
    is brought in whole; where its scratch does not fit beside the running job, only its state.
    """
    free = capacity - sum(need.fixed for need in needs.values())
    states: set[K] = set()
    scratches: set[K] = set()
    if running is not None:
        states.add(running)
        scratches.add(running)
        free -= needs[running].whole
    first = next((job for job in coming if job != running), None)
    if first is not None and needs[first].state <= free:
        states.add(first)
        free -= needs[first].state
        if needs[first].scratch <= free:
            scratches.add(first)
            free -= needs[first].scratch
    for job in (*coming, *recent):
        if job not in states and (job in now.states or (job in coming and job != first)) and needs[job].state <= free:
            states.add(job)
            free -= needs[job].state
    for job in (*coming, *recent):  # scratch is the cheapest to bring back, so it is kept last
        if job in states and job not in scratches and job in now.scratches and needs[job].scratch <= free:
            scratches.add(job)
            free -= needs[job].scratch
    return Residents(frozenset(states), frozenset(scratches))
