"""Stride scheduler: grants turns on a device whose jobs are time-sliced; pure.

A lower turn goes first whenever it requests one. Equal turns share the time in proportion to their fractions: next is
the client with the least time used per fraction (stride scheduling, Waldspurger and Weihl 1995). A client that has
waited for ``max_wait_s`` goes before all others.

Grants are numbered. When the holder begins its last step, the next grants are *queued*: their clients prepare while
that step runs and begin as soon as the grant before theirs ends, which they learn from the device handoff. Two queued
grants instead of one give a slow host a whole turn to catch up. A second one is queued only if no client that requests
a turn meanwhile could go before it.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, TypeVar

from carpool.runtime.job_state.types import WorkerSlot

J = TypeVar("J", bound=Hashable)
K = TypeVar("K", bound=Hashable)

_MAX_STEPS = 64  # of one grant


class TurnGrant(NamedTuple, Generic[K]):
    """Permission to run a number of steps."""

    client: K
    steps: int
    number: int  # higher than those of all grants before
    after: int  # begins when the grant of this number has ended


@dataclass(slots=True)
class _Client:
    turn: int
    fraction: float
    multi_step: bool = False  # a grant may be for several steps: it waits for no other rank between them
    can_queue: bool = False  # it learns from the handoff when the grant before its own has ended
    min_steps: int = 1  # of its next grant
    used: float = 0.0  # device time, per fraction
    requested_at: float | None = None
    step_s: float = 0.0
    number: int = 0  # of its newest grant


def time_sliced_jobs(slots: Mapping[J, Sequence[WorkerSlot]], max_concurrent: Mapping[int, int]) -> set[J]:
    """Jobs that share a device with different turns, or with more jobs than can compute there at the same time."""
    sharers: dict[int, list[tuple[J, WorkerSlot]]] = {}
    for job, held in slots.items():
        for slot in held:
            sharers.setdefault(slot.device, []).append((job, slot))
    found: set[J] = set()
    for device, here in sharers.items():
        if len(here) > max_concurrent[device] or len({slot.turn for _, slot in here}) > 1:
            found.update(job for job, _ in here)
    return found


class StrideScheduler(Generic[K]):
    """Grants turns on one device."""

    def __init__(self, max_wait_s: float, quantum_s: float = 0.02, min_steps: int = 1, max_queued: int = 1) -> None:
        self._max_wait_s = max_wait_s
        self._quantum_s = quantum_s  # target duration of a grant
        self._min_steps = min_steps  # of a grant, however long they take
        self._max_queued = max_queued
        self._clients: dict[K, _Client] = {}
        self._held: TurnGrant[K] | None = None
        self._queued: list[TurnGrant[K]] = []
        self._granted_at = 0.0
        self._granted_steps = 1
        self._charged_at = 0.0  # the holder's time is counted up to here
        self._last = 0  # grant number

    @property
    def last_ended(self) -> int:
        """All grants up to this number have ended."""
        return self._last if self._held is None else self._held.number - 1

    @property
    def holder(self) -> K | None:
        return None if self._held is None else self._held.client

    def request(
        self,
        at: float,
        key: K,
        turn: int,
        fraction: float,
        *,
        multi_step: bool = False,
        can_queue: bool = False,
        min_steps: int = 1,
    ) -> None:
        """Request a turn; ends the grant that the client may hold."""
        self.release(at, key)
        client = self._clients.get(key)
        if client is None:
            # A new client has not used the device yet, but must not block the others until it has caught up.
            least = min((c.used for c in self._clients.values() if c.turn == turn), default=0.0)
            client = self._clients[key] = _Client(turn, fraction, used=least)
        client.turn, client.fraction = turn, fraction
        client.multi_step, client.can_queue, client.min_steps = multi_step, can_queue, min_steps
        if client.requested_at is None:
            client.requested_at = at

    def on_ending(self, at: float, key: K, number: int) -> list[TurnGrant[K]]:
        """A client has begun the last step of its grant and requests another. Returns the grants queued now."""
        if any((grant.client, grant.number) == (key, number) for grant in self._queued):
            while self._held is not None and self._held.number != number:  # otherwise it could not have begun
                self.release(at, self._held.client)
        client = self._clients.get(key)
        if client is None or client.number != number:
            return []
        client.requested_at = at
        return self._queue_grants(at) if self._held is not None and self._held.number == number else []

    def _queue_grants(self, at: float) -> list[TurnGrant[K]]:
        queued: list[TurnGrant[K]] = []
        while self._held is not None and len(self._queued) < self._max_queued:
            self._charge(at)
            key = self._most_urgent(at, [grant.client for grant in self._queued])
            client = None if key is None else self._clients[key]
            if key is None or client is None or client.requested_at is None or not client.can_queue:
                break
            before = self._queued[-1] if self._queued else self._held
            queued.append(self._new_grant(key, before.number))
            self._queued.append(queued[-1])
        return queued

    def likely_next(self, at: float) -> K | None:
        """The client that would be granted next, after those that are queued."""
        return None if self._queued else self._most_urgent(at)

    def on_ended(self, at: float, key: K, number: int) -> None:
        if self._held is not None and (self._held.client, self._held.number) == (key, number):
            self.release(at, key)

    def release(self, at: float, key: K) -> None:
        """End the grant that a client holds; the first queued one takes its place."""
        if self._held is None or self._held.client != key:
            return
        self._charge(at)
        self._clients[key].step_s = max(0.0, at - self._granted_at) / self._granted_steps
        self._hold(at, self._queued.pop(0) if self._queued else None)

    def cancel(self, at: float, key: K) -> None:
        self._queued = [grant for grant in self._queued if grant.client != key]
        self.release(at, key)
        if key in self._clients:
            self._clients[key].requested_at = None

    def remove(self, at: float, key: K) -> None:
        self.cancel(at, key)
        self._clients.pop(key, None)

    def grant_next(self, at: float) -> TurnGrant[K] | None:
        """Grant the device to the most urgent client; None if it is held or not requested."""
        key = self._most_urgent(at) if self._held is None else None
        if key is None:
            return None
        grant = self._new_grant(key, self._last)
        self._hold(at, grant)
        return grant

    def _new_grant(self, key: K, after: int) -> TurnGrant[K]:
        client = self._clients[key]
        client.requested_at = None
        self._last += 1
        client.number = self._last
        return TurnGrant(key, self._steps_for(client), self._last, after)

    def _hold(self, at: float, grant: TurnGrant[K] | None) -> None:
        self._held = grant
        if grant is not None:
            self._granted_at, self._granted_steps, self._charged_at = at, grant.steps, at

    def _charge(self, at: float) -> None:
        assert self._held is not None
        client = self._clients[self._held.client]
        client.used += max(0.0, at - self._charged_at) / client.fraction
        self._charged_at = at

    def _steps_for(self, client: _Client) -> int:
        steps = max(self._min_steps, client.min_steps) if client.multi_step else 1
        client.min_steps = 1
        if client.multi_step and client.step_s > 0.0:
            steps = max(steps, min(_MAX_STEPS, int(self._quantum_s / client.step_s)))
        return steps

    def _most_urgent(self, at: float, queued: Sequence[K] = ()) -> K | None:
        """The most urgent of the waiting clients and of the queued ones, which may request again early."""
        waiting = [(key, client) for key, client in self._clients.items() if client.requested_at is not None]
        expected = [(key, self._after_its_turn(at, self._clients[key])) for key in queued]
        if not waiting:
            return None
        return min((*waiting, *expected), key=lambda item: self._urgency(at, item[1]))[0]

    def _after_its_turn(self, at: float, client: _Client) -> _Client:
        planned_s = client.step_s * self._steps_for(replace(client))
        return replace(client, requested_at=at, used=client.used + planned_s / client.fraction)

    def _urgency(self, at: float, client: _Client) -> tuple[bool, float, float, float]:
        assert client.requested_at is not None
        if at - client.requested_at >= self._max_wait_s:
            return False, client.requested_at, 0.0, 0.0
        return True, float(client.turn), client.used, client.requested_at
