"""Stride scheduler: grants turns on a device whose jobs are time-sliced; pure.

A lower turn goes first whenever it asks. Equal turns share the time in proportion to their fractions: of those that
ask, the one goes next that has had the least time for its fraction (stride scheduling, Waldspurger and Weihl 1995).
Whoever has waited for ``max_wait_s`` goes before all others.

Grants are numbered. Whoever holds the token says so when it comes to its last step, and then its *heirs* are chosen:
they can make themselves ready while that step runs, and each begins as soon as the grant before its own has come to its
end, which it learns from the one before itself (baton.py) and not from us. Two heirs instead of one give a host that is
late a whole turn to be so. The second is named only if whoever asks meanwhile could not go before it.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, TypeVar

from carpool.runtime.job_state.types import WorkerSlot

J = TypeVar("J", bound=Hashable)
K = TypeVar("K", bound=Hashable)

_MOST_STEPS = 64  # with one grant


class TurnGrant(NamedTuple, Generic[K]):
    """Leave to make some steps."""

    who: K
    steps: int
    number: int  # higher than those of all grants before
    after: int  # it begins when the grant of this number has come to its end


@dataclass(slots=True)
class _Client:
    turn: int
    fraction: float
    may_take_several: bool = False  # steps with one grant: it need not wait for others between them
    may_inherit: bool = False  # it learns by itself when the grant before its own has ended
    least_steps: int = 1  # of its next grant
    used: float = 0.0  # device time had, by fraction
    asked_at: float | None = None
    step_s: float = 0.0  # a step takes about so long
    number: int = 0  # of its newest grant


def time_sliced_jobs(seats: Mapping[J, Sequence[WorkerSlot]], room: Mapping[int, int]) -> set[J]:
    """The jobs that share a device with unlike turns, or with more jobs than it has ``room`` for side by side."""
    sharers: dict[int, list[tuple[J, WorkerSlot]]] = {}
    for job, held in seats.items():
        for seat in held:
            sharers.setdefault(seat.device, []).append((job, seat))
    found: set[J] = set()
    for device, there in sharers.items():
        if len(there) > room[device] or len({seat.turn for _, seat in there}) > 1:
            found.update(job for job, _ in there)
    return found


class StrideScheduler(Generic[K]):
    """The token of one device."""

    def __init__(self, max_wait_s: float, quantum_s: float = 0.02, least_steps: int = 1, most_heirs: int = 1) -> None:
        self._max_wait_s = max_wait_s
        self._quantum_s = quantum_s  # a grant is for about so long, so that asking costs little
        self._least_steps = least_steps  # of a grant, however long they take
        self._clients: dict[K, _Client] = {}
        self._held: TurnGrant[K] | None = None
        self._heirs: list[TurnGrant[K]] = []  # know that they are next, in this order
        self._most_heirs = most_heirs
        self._granted_at = 0.0
        self._granted_steps = 1
        self._charged_at = 0.0  # the holder's time is counted up to here
        self._last = 0  # number given out

    @property
    def over(self) -> int:
        """All grants up to this number have come to their ends."""
        return self._last if self._held is None else self._held.number - 1

    @property
    def holder(self) -> K | None:
        """Who computes now, as far as is known here."""
        return None if self._held is None else self._held.who

    def ask(
        self,
        at: float,
        who: K,
        turn: int,
        fraction: float,
        *,
        may_take_several: bool = False,
        may_inherit: bool = False,
        least_steps: int = 1,
    ) -> None:
        """Somebody wants to compute; a grant it had before has come to its end."""
        self.give_back(at, who)
        client = self._clients.get(who)
        if client is None:
            # A newcomer has had nothing yet, but must not keep the others waiting until it has caught up.
            least = min((c.used for c in self._clients.values() if c.turn == turn), default=0.0)
            client = self._clients[who] = _Client(turn, fraction, used=least)
        client.turn, client.fraction = turn, fraction
        client.may_take_several, client.may_inherit, client.least_steps = may_take_several, may_inherit, least_steps
        if client.asked_at is None:
            client.asked_at = at

    def ending(self, at: float, who: K, number: int) -> list[TurnGrant[K]]:
        """Somebody is at the last step of its grant and asks for another: the heirs that can be named now.

        It may be among them.
        """
        if any((heir.who, heir.number) == (who, number) for heir in self._heirs):
            while self._held is not None and self._held.number != number:  # else it could not have begun
                self.give_back(at, self._held.who)
        client = self._clients.get(who)
        if client is None or client.number != number:
            return []
        client.asked_at = at
        return self._name_heirs(at) if self._held is not None and self._held.number == number else []

    def _name_heirs(self, at: float) -> list[TurnGrant[K]]:
        named: list[TurnGrant[K]] = []
        while self._held is not None and len(self._heirs) < self._most_heirs:
            self._charge(at)
            chosen = self._most_urgent(at, [heir.who for heir in self._heirs])
            client = None if chosen is None else self._clients[chosen]
            if chosen is None or client is None or client.asked_at is None or not client.may_inherit:
                break
            before = self._heirs[-1] if self._heirs else self._held
            named.append(self._granted(chosen, before.number))
            self._heirs.append(named[-1])
        return named

    def likely(self, at: float) -> K | None:
        """Who would be next now, after those who know that already."""
        return None if self._heirs else self._most_urgent(at)

    def passed(self, at: float, who: K, number: int) -> None:
        """Somebody's grant has come to its end."""
        if self._held is not None and (self._held.who, self._held.number) == (who, number):
            self.give_back(at, who)

    def give_back(self, at: float, who: K) -> None:
        """Somebody does not need the token any more for now; its heir has it then."""
        if self._held is None or self._held.who != who:
            return
        self._charge(at)
        self._clients[who].step_s = max(0.0, at - self._granted_at) / self._granted_steps
        self._hold(at, self._heirs.pop(0) if self._heirs else None)

    def withdraw(self, at: float, who: K) -> None:
        """Somebody rests: it neither has the token nor waits for it."""
        self._heirs = [heir for heir in self._heirs if heir.who != who]
        self.give_back(at, who)
        if who in self._clients:
            self._clients[who].asked_at = None

    def leave(self, at: float, who: K) -> None:
        """Somebody is gone, or begins anew."""
        self.withdraw(at, who)
        self._clients.pop(who, None)

    def next(self, at: float) -> TurnGrant[K] | None:
        """Who may compute now; None if the token is not free or nobody asks."""
        who = self._most_urgent(at) if self._held is None else None
        if who is None:
            return None
        granted = self._granted(who, self._last)
        self._hold(at, granted)
        return granted

    def _granted(self, who: K, after: int) -> TurnGrant[K]:
        client = self._clients[who]
        client.asked_at = None
        self._last += 1
        client.number = self._last
        return TurnGrant(who, self._steps_for(client), self._last, after)

    def _hold(self, at: float, granted: TurnGrant[K] | None) -> None:
        self._held = granted
        if granted is not None:
            self._granted_at, self._granted_steps, self._charged_at = at, granted.steps, at

    def _charge(self, at: float) -> None:
        """Count the time that the holder has had."""
        assert self._held is not None
        client = self._clients[self._held.who]
        client.used += max(0.0, at - self._charged_at) / client.fraction
        self._charged_at = at

    def _steps_for(self, client: _Client) -> int:
        steps = max(self._least_steps, client.least_steps) if client.may_take_several else 1
        client.least_steps = 1
        if client.may_take_several and client.step_s > 0.0:
            steps = max(steps, min(_MOST_STEPS, int(self._quantum_s / client.step_s)))
        return steps

    def _most_urgent(self, at: float, named: Sequence[K] = ()) -> K | None:
        """Who goes first of those who ask, and of those ``named`` who may ask again before it is time."""
        waiting = [(who, client) for who, client in self._clients.items() if client.asked_at is not None]
        expected = [(who, self._after_its_turn(at, self._clients[who])) for who in named]
        if not waiting:
            return None
        return min((*waiting, *expected), key=lambda item: self._urgency(at, item[1]))[0]

    def _after_its_turn(self, at: float, client: _Client) -> _Client:
        """A client as it will be when it has had the turn that it was named for."""
        planned_s = client.step_s * self._steps_for(replace(client))
        return replace(client, asked_at=at, used=client.used + planned_s / client.fraction)

    def _urgency(self, at: float, client: _Client) -> tuple[bool, float, float, float]:
        assert client.asked_at is not None
        if at - client.asked_at >= self._max_wait_s:
            return False, client.asked_at, 0.0, 0.0
        return True, float(client.turn), client.used, client.asked_at
