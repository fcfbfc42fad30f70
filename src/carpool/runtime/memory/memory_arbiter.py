"""Memory arbiter of one device under a cap: admits granted jobs and evicts others to make room; pure.

A grant waits here until there is room for whom it is for. Whoever has not said yet what it needs is taken to need all
of the cap: it loads, makes its first steps and is measured alone on the device.
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
    """Somebody has to give memory back: its scratch, or wholly its state too."""

    who: K
    wholly: bool


@dataclass(frozen=True, slots=True)
class Admit(Generic[K]):
    """Somebody is let in: its state, and wholly its scratch too."""

    who: K
    wholly: bool


@dataclass(slots=True)
class Counts:
    """How often a job that came to its turn was still on the device."""

    turns: int = 0
    hits: int = 0


@dataclass(frozen=True, slots=True)
class SwapPlan(Generic[K]):
    """What is to be said now."""

    told: list[TurnGrant[K]]  # grants that have room
    leave: list[Evict[K]]
    come: list[Admit[K]]  # before their turn


@dataclass(slots=True, eq=False)
class MemoryArbiter(Generic[K]):
    """Who is on the device, and who waits for room there."""

    capacity: int  # bytes
    speculates: bool = True  # keeps those who may come again, and lets the next ones in while another computes
    leaves_early: bool = True  # who computes gives its memory back without being asked once it is through
    needs: dict[K, MemoryNeed] = field(default_factory=dict)
    counts: dict[K, Counts] = field(default_factory=dict)
    _states: set[K] = field(default_factory=set)  # on the device, or on their way to or from it
    _scratches: set[K] = field(default_factory=set)
    _leaving: dict[K, bool] = field(default_factory=dict)  # told to, and not gone yet; wholly or not
    _recent: list[K] = field(default_factory=list)  # the latest first
    _waiting: list[TurnGrant[K]] = field(default_factory=list)

    @property
    def taken(self) -> int:
        """Bytes on the device, or on their way there, of those who have been measured."""
        return self._taken_by_others(None)

    @property
    def room(self) -> int:
        """Bytes that a newcomer may take, alone on the device."""
        return max(0, self.capacity - self._fixed)

    def measured(self, who: K, need: MemoryNeed) -> None:
        """Somebody said what it takes."""
        self.needs[who] = need

    def want(self, granted: TurnGrant[K]) -> None:
        """Somebody is next."""
        self._waiting.append(granted)
        counts = self.counts.setdefault(granted.who, Counts())
        counts.turns += 1
        counts.hits += granted.who in self._states and granted.who not in self._leaving

    def left(self, who: K, *, wholly: bool) -> None:
        """Somebody gave back what it was told to."""
        if self._leaving.get(who) == wholly:
            del self._leaving[who]
        self._scratches.discard(who)
        if wholly:
            self._states.discard(who)

    def give_up(self, who: K) -> None:
        """Somebody will not use the grant that it may be waiting for."""
        self._waiting = [granted for granted in self._waiting if granted.who != who]

    def gone(self, who: K) -> None:
        """Somebody's process has ended."""
        self.give_up(who)
        for group in (self._states, self._scratches):
            group.discard(who)
        self._leaving.pop(who, None)
        self.needs.pop(who, None)
        self._recent = [other for other in self._recent if other != who]

    def moves(self, running: K | None, soon: K | None = None) -> SwapPlan[K]:
        """What to say, while somebody computes and somebody else will probably be next after those who wait here."""
        made: SwapPlan[K] = SwapPlan([], [], [])
        while self._waiting:
            granted = self._waiting[0]
            if not self.speculates and running not in {None, granted.who}:
                return made
            if not self._admit(granted.who, running, made.leave):
                return made
            del self._waiting[0]
            self._recent = [granted.who, *(other for other in self._recent if other != granted.who)]
            made.told.append(granted)
        may_come = soon is not None and self.speculates and soon in self.needs and soon not in self._states
        if may_come and soon is not None and running is not None and running in self.needs:
            self._expect(soon, running, made)
        return made

    def _expect(self, who: K, running: K, made: SwapPlan[K]) -> None:
        """Let somebody in while another computes: as much of it as fits beside that one.

        Where nothing does, those who rest make room meanwhile: then only the one that computes has to leave for it.
        """
        beside = self._plan(running, who)
        if who not in beside.states:
            self._send_away(self._plan_alone(who), {who, running}, made.leave)
            return
        self._send_away(beside, {who, running}, made.leave)
        wholly = who in beside.scratches
        if self._has_room(who, wholly=wholly):
            self._states.add(who)
            if wholly:
                self._scratches.add(who)
            made.come.append(Admit(who, wholly))

    def _admit(self, who: K, running: K | None, leave: list[Evict[K]]) -> bool:
        """Let somebody in wholly if there is room; else say who has to leave for it."""
        wanted = self._plan(running, who)
        if who not in wanted.scratches:  # not beside the one that computes: that has to leave too, when it is through
            wanted = self._plan_alone(who)
        self._send_away(wanted, {who} if self.leaves_early or running is None else {who, running}, leave)
        if not self._has_room(who, wholly=True):
            return False
        self._states.add(who)
        self._scratches.add(who)
        return True

    def _send_away(self, wanted: Residents[K], spared: set[K], leave: list[Evict[K]]) -> None:
        """Tell those to leave who have what others are to have."""
        for other in [*self._states]:
            if other in spared:
                continue
            wholly = other not in wanted.states
            is_told = self._leaving.get(other, False) or (other in self._leaving and not wholly)
            if not is_told and (wholly or (other in self._scratches and other not in wanted.scratches)):
                self._leaving[other] = wholly
                leave.append(Evict(other, wholly))

    def _has_room(self, who: K, *, wholly: bool) -> bool:
        """Whether somebody can come in now."""
        if who in self._leaving:
            return False
        if not self._states - {who}:  # then it has all there is, whatever it needs
            return True
        need = self._need(who)
        return self._taken_by_others(who) + (need.whole if wholly else need.state) <= self.capacity

    def _plan_alone(self, who: K) -> Residents[K]:
        """Who is to be there once the one that computes is through; nobody else beside one larger than the cap."""
        wanted = self._plan(None, who)
        return wanted if who in wanted.scratches else Residents(frozenset(), frozenset())

    def _plan(self, running: K | None, who: K) -> Residents[K]:
        now = Residents(frozenset(self._states), frozenset(self._scratches))
        holder = running if running in self._states and running != who else None
        needs = {each: self._need(each) for each in {*self._states, who, *self.needs}}
        recent = [other for other in self._recent if other in needs] if self.speculates else []
        return plan_residents(self.capacity, needs, now, running=holder, coming=[who], recent=recent)

    def _taken_by_others(self, who: K | None) -> int:
        states = sum(self._need(each).state for each in self._states if each != who)
        scratches = sum(self._need(each).scratch for each in self._scratches if each != who)
        return states + scratches + self._fixed

    @property
    def _fixed(self) -> int:
        return sum(need.fixed for need in self.needs.values())

    def _need(self, who: K) -> MemoryNeed:
        return self.needs[who] if who in self.needs else MemoryNeed(self.room)
