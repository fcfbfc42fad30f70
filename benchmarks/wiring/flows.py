"""Transfers that share links with max-min fair bandwidth, recomputed whenever one starts or ends."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from itertools import count

Route = tuple[int, ...]  # directed links, by number
Then = Callable[[], None]

_NEARLY = 1e-9


class Flow:
    """Bytes on their way."""

    __slots__ = ("left", "rate", "route", "then")

    def __init__(self, route: Route, num_bytes: float, then: Then) -> None:
        self.route = route
        self.left = num_bytes
        self.rate = 0.0
        self.then = then


class Transfers:
    """A clock, timers, and the flows that are under way."""

    def __init__(self, bytes_per_s: Sequence[float], latency_s: Sequence[float]) -> None:
        self.now = 0.0
        self._speeds = bytes_per_s
        self._latencies = latency_s
        self._timers: list[tuple[float, int, Then]] = []
        self._number = count()
        self._flows: list[Flow] = []
        self._rates: dict[tuple[Route, ...], dict[Route, float]] = {}  # by the routes in use: mixes come again

    def after(self, seconds: float, then: Then) -> None:
        """Do something later."""
        heapq.heappush(self._timers, (self.now + seconds, next(self._number), then))

    def send(self, route: Route, num_bytes: float, then: Then) -> None:
        """Start a flow, and do something when all has arrived; it takes the latencies of its links to begin."""
        if not route:
            self.after(0.0, then)
            return
        self.after(sum(self._latencies[link] for link in route), lambda: self._begin(Flow(route, num_bytes, then)))

    def run(self, until: Callable[[], bool]) -> None:
        """Go on until something holds."""
        while not until():
            ends = min((flow.left / flow.rate for flow in self._flows), default=float("inf"))
            due = self._timers[0][0] - self.now if self._timers else float("inf")
            self._advance(min(ends, due))
            if due <= ends:
                _, _, then = heapq.heappop(self._timers)
                then()
                continue
            done = [flow for flow in self._flows if flow.left <= _NEARLY * flow.rate]
            self._flows = [flow for flow in self._flows if flow.left > _NEARLY * flow.rate]
            self._share()
            for flow in done:
                flow.then()

    def _advance(self, seconds: float) -> None:
        self.now += seconds
        for flow in self._flows:
            flow.left -= flow.rate * seconds

    def _begin(self, flow: Flow) -> None:
        self._flows.append(flow)
        self._share()

    def _share(self) -> None:
        key = tuple(sorted([flow.route for flow in self._flows]))
        rates = self._rates.get(key)
        if rates is None:
            rates = self._rates[key] = max_min(key, self._speeds)
        for flow in self._flows:
            flow.rate = rates[flow.route]


def max_min(routes: Sequence[Route], speeds: Sequence[float]) -> dict[Route, float]:
    """Fill all flows alike until a link is full; those on it stay, the others go on (progressive filling)."""
    waiting: dict[Route, int] = {}
    users: dict[int, int] = {}
    for route in routes:
        waiting[route] = waiting.get(route, 0) + 1
        for link in route:
            users[link] = users.get(link, 0) + 1
    room = {link: speeds[link] for link in users}
    rates: dict[Route, float] = {}
    while waiting:
        tightest = min(users, key=lambda link: (room[link] / users[link], link))
        rate = room[tightest] / users[tightest]
        for route in [route for route in waiting if tightest in route]:
            number = waiting.pop(route)
            rates[route] = rate
            for link in route:
                room[link] = max(0.0, room[link] - rate * number)
                users[link] -= number
                if not users[link]:
                    del users[link]
    return rates
