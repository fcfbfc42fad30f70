"""Memory arbiter of one device under a cap: admits granted jobs and evicts others to make room; pure.

A turn grant waits here until there is memory for its job. A job that has not been measured yet is assumed to need the
whole cap: it loads, makes its first steps and is measured alone on the device.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from carpool.runtime.memory.eviction_policy import MemoryNeed, Residents, plan_residents
from carpool.runtime.sharing.stride_scheduler import TurnGrant

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Evict(Generic[K]):
    """Swap out a job's scratch, and ``wholly`` its state too."""

    client: K
    wholly: bool


@dataclass(frozen=True, slots=True)
class Admit(Generic[K]):
    """Swap in a job's state, and ``wholly`` its scratch too."""

    client: K
    wholly: bool


@dataclass(slots=True)
class Counts:
    """A job's turns, and how many of them found its state on the device."""

    turns: int = 0
    hits: int = 0


@dataclass(frozen=True, slots=True)
class SwapPlan(Generic[K]):
    """The messages to send now."""

    granted: list[TurnGrant[K]]  # grants that have memory
    swap_out: list[Evict[K]]
    swap_in: list[Admit[K]]  # before their turn


@dataclass(slots=True, eq=False)
class MemoryArbiter(Generic[K]):
    """Jobs on the device, and grants that wait for memory there."""

    capacity: int  # bytes
    swap_ahead: bool = True  # swap the next job in while another runs, and keep recently used jobs
    evict_early: bool = True  # order the running job to swap out before its turn has ended
    needs: dict[K, MemoryNeed] = field(default_factory=dict)
    counts: dict[K, Counts] = field(default_factory=dict)
    _states: set[K] = field(default_factory=set)  # on the device, or being swapped in or out
    _scratches: set[K] = field(default_factory=set)
    _leaving: dict[K, bool] = field(default_factory=dict)  # being swapped out; wholly or not
    _recent: list[K] = field(default_factory=list)  # the latest first
    _waiting: list[TurnGrant[K]] = field(default_factory=list)

    @property
    def taken(self) -> int:
        """Bytes of measured jobs on the device, or being swapped in."""
        return self._taken_by_others(None)

    @property
    def free_bytes(self) -> int:
        """Bytes for a new job that is alone on the device."""
        return max(0, self.capacity - self._fixed)

    def on_measured(self, client: K, need: MemoryNeed) -> None:
        self.needs[client] = need

    def enqueue(self, grant: TurnGrant[K]) -> None:
        self._waiting.append(grant)
        counts = self.counts.setdefault(grant.client, Counts())
        counts.turns += 1
        counts.hits += grant.client in self._states and grant.client not in self._leaving

    def on_swapped_out(self, client: K, *, wholly: bool) -> None:
        if self._leaving.get(client) == wholly:
            del self._leaving[client]
        self._scratches.discard(client)
        if wholly:
            self._states.discard(client)

    def cancel(self, client: K) -> None:
        self._waiting = [grant for grant in self._waiting if grant.client != client]

    def on_exit(self, client: K) -> None:
        self.cancel(client)
        for group in (self._states, self._scratches):
            group.discard(client)
        self._leaving.pop(client, None)
        self.needs.pop(client, None)
        self._recent = [other for other in self._recent if other != client]

    def plan(self, running: K | None, likely_next: K | None = None) -> SwapPlan[K]:
        """Admit waiting grants in order as far as memory allows; then bring in the job that is likely next."""
        plan: SwapPlan[K] = SwapPlan([], [], [])
        while self._waiting:
            grant = self._waiting[0]
            if not self.swap_ahead and running not in {None, grant.client}:
                return plan
            if not self._admit(grant.client, running, plan.swap_out):
                return plan
            del self._waiting[0]
            self._recent = [grant.client, *(other for other in self._recent if other != grant.client)]
            plan.granted.append(grant)
        is_known = likely_next in self.needs and likely_next not in self._states
        if likely_next is not None and is_known and self.swap_ahead and running is not None and running in self.needs:
            self._swap_in_ahead(likely_next, running, plan)
        return plan

    def _swap_in_ahead(self, client: K, running: K, plan: SwapPlan[K]) -> None:
        """Bring in as much of a job as fits beside the running one.

        If nothing fits, idle jobs are evicted meanwhile, so that later only the running one has to be swapped out.
        """
        beside = self._residents_with(running, client)
        if client not in beside.states:
            self._evict(self._residents_without_running(client), {client, running}, plan.swap_out)
            return
        self._evict(beside, {client, running}, plan.swap_out)
        wholly = client in beside.scratches
        if self._fits(client, wholly=wholly):
            self._states.add(client)
            if wholly:
                self._scratches.add(client)
            plan.swap_in.append(Admit(client, wholly))

    def _admit(self, client: K, running: K | None, swap_out: list[Evict[K]]) -> bool:
        wanted = self._residents_with(running, client)
        if client not in wanted.scratches:  # does not fit beside the running job, which then has to be swapped out, too
            wanted = self._residents_without_running(client)
        self._evict(wanted, {client} if self.evict_early or running is None else {client, running}, swap_out)
        if not self._fits(client, wholly=True):
            return False
        self._states.add(client)
        self._scratches.add(client)
        return True

    def _evict(self, wanted: Residents[K], spared: set[K], swap_out: list[Evict[K]]) -> None:
        for other in [*self._states]:
            if other in spared:
                continue
            wholly = other not in wanted.states
            is_leaving = self._leaving.get(other, False) or (other in self._leaving and not wholly)
            if not is_leaving and (wholly or (other in self._scratches and other not in wanted.scratches)):
                self._leaving[other] = wholly
                swap_out.append(Evict(other, wholly))

    def _fits(self, client: K, *, wholly: bool) -> bool:
        if client in self._leaving:
            return False
        if not self._states - {client}:  # alone on the device it may exceed the cap
            return True
        need = self._need(client)
        return self._taken_by_others(client) + (need.whole if wholly else need.state) <= self.capacity

    def _residents_without_running(self, client: K) -> Residents[K]:
        """The jobs that stay once the running job has left; if `client` alone exceeds the cap, none."""
        wanted = self._residents_with(None, client)
        return wanted if client in wanted.scratches else Residents(frozenset(), frozenset())

    def _residents_with(self, running: K | None, client: K) -> Residents[K]:
        now = Residents(frozenset(self._states), frozenset(self._scratches))
        holder = running if running in self._states and running != client else None
        needs = {each: self._need(each) for each in {*self._states, client, *self.needs}}
        recent = [other for other in self._recent if other in needs] if self.swap_ahead else []
        return plan_residents(self.capacity, needs, now, running=holder, coming=[client], recent=recent)

    def _taken_by_others(self, client: K | None) -> int:
        states = sum(self._need(each).state for each in self._states if each != client)
        scratches = sum(self._need(each).scratch for each in self._scratches if each != client)
        return states + scratches + self._fixed

    @property
    def _fixed(self) -> int:
        return sum(need.fixed for need in self.needs.values())

    def _need(self, client: K) -> MemoryNeed:
        return self.needs[client] if client in self.needs else MemoryNeed(self.free_bytes)
