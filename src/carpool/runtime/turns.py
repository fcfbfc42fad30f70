"""Who may compute next on a device whose jobs take turns; pure.

A lower turn goes first whenever it asks. Equal turns share the time in proportion to their fractions: of those that
ask, the one goes next that has had the least time for its fraction (stride scheduling, Waldspurger and Weihl 1995).
Whoever has waited for ``max_wait_s`` goes before all others.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from carpool.runtime.crew import Seat

J = TypeVar("J", bound=Hashable)
K = TypeVar("K", bound=Hashable)

_MOST_STEPS = 64  # with one grant


@dataclass(slots=True)
class _Client:
    turn: int
    fraction: float
    may_take_several: bool = False  # steps with one grant: it need not wait for others between them
    used: float = 0.0  # device time had, by fraction
    asked_at: float | None = None
    step_s: float = 0.0  # a step takes about so long


def who_take_turns(seats: Mapping[J, Sequence[Seat]], room: Mapping[int, int]) -> set[J]:
    """The jobs that share a device with unlike turns, or with more jobs than it has ``room`` for side by side."""
    sharers: dict[int, list[tuple[J, Seat]]] = {}
    for job, held in seats.items():
        for seat in held:
            sharers.setdefault(seat.device, []).append((job, seat))
    found: set[J] = set()
    for device, there in sharers.items():
        if len(there) > 1 and (len(there) > room[device] or len({seat.turn for _, seat in there}) > 1):
            found.update(job for job, _ in there)
    return found


class Turns(Generic[K]):
    """The token of one device."""

    def __init__(self, max_wait_s: float, quantum_s: float = 0.02) -> None:
        self._max_wait_s = max_wait_s
        self._quantum_s = quantum_s  # a grant is for about so long, so that asking costs little
        self._clients: dict[K, _Client] = {}
        self._holder: K | None = None
        self._granted_at = 0.0
        self._granted_steps = 1

    def ask(self, at: float, who: K, turn: int, fraction: float, *, may_take_several: bool = False) -> None:
        """Somebody wants to compute; a grant it had before has come to its end."""
        self.give_back(at, who)
        client = self._clients.get(who)
        if client is None:
            # A newcomer has had nothing yet, but must not keep the others waiting until it has caught up.
            least = min((c.used for c in self._clients.values() if c.turn == turn), default=0.0)
            client = self._clients[who] = _Client(turn, fraction, used=least)
        client.turn, client.fraction, client.may_take_several = turn, fraction, may_take_several
        if client.asked_at is None:
            client.asked_at = at

    def give_back(self, at: float, who: K) -> None:
        """Somebody does not need the token any more for now."""
        if self._holder is None or self._holder != who:
            return
        client = self._clients[who]
        took_s = max(0.0, at - self._granted_at)
        client.used += took_s / client.fraction
        client.step_s = took_s / self._granted_steps
        self._holder = None

    def withdraw(self, at: float, who: K) -> None:
        """Somebody rests: it neither has the token nor waits for it."""
        self.give_back(at, who)
        if who in self._clients:
            self._clients[who].asked_at = None

    def leave(self, at: float, who: K) -> None:
        """Somebody is gone, or begins anew."""
        self.give_back(at, who)
        self._clients.pop(who, None)

    def next(self, at: float) -> tuple[K, int] | None:
        """Who may compute now, and for how many steps; None if the token is not free or nobody asks."""
        waiting = [(who, client) for who, client in self._clients.items() if client.asked_at is not None]
        if self._holder is not None or not waiting:
            return None
        who, client = min(waiting, key=lambda item: self._urgency(at, item[1]))
        client.asked_at = None
        steps = 1
        if client.may_take_several and client.step_s > 0.0:
            steps = max(1, min(_MOST_STEPS, int(self._quantum_s / client.step_s)))
        self._holder, self._granted_at, self._granted_steps = who, at, steps
        return who, steps

    def _urgency(self, at: float, client: _Client) -> tuple[bool, float, float, float]:
        assert client.asked_at is not None
        if at - client.asked_at >= self._max_wait_s:
            return False, client.asked_at, 0.0, 0.0
        return True, float(client.turn), client.used, client.asked_at
