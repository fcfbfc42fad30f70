"""Simulates trainings step by step over `flows`: forward, bucketed backward, and the exchange of each bucket."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from wiring.flows import Route, Then, Transfers

Routes = Callable[[int, int], Route]  # from a device (-1: the host of the other) to a device


@dataclass(frozen=True, slots=True)
class Made:
    """A made-up training. Nobody but the simulation knows forward, buckets and noise."""

    name: str
    fixed_s: float  # of a step on the fastest kind
    per_sample_s: float
    gradient_bytes: float
    input_bytes: float  # of a sample
    exchange: str
    buckets: int = 1
    forward: float = 0.33  # portion of computing before the first gradient
    noise: float = 0.03


class Session:
    """One training on its devices, step after step."""

    def __init__(
        self,
        transfers: Transfers,
        made: Made,
        devices: Sequence[int],
        slowness: Sequence[float],
        samples: float,
        routes: Routes,
        random: Random,
    ) -> None:
        self.ends: list[float] = []  # of steps
        self._transfers = transfers
        self._made = made
        self._devices = sorted(devices)
        self._slowness = max(slowness)
        self._samples = samples
        self._routes = routes
        self._random = random
        self._fetched = False
        self._computed = False
        self._ready = 0  # buckets whose gradients are there
        self._sent = 0  # buckets that have been exchanged
        self._is_sending = False
        self._begin()

    def _begin(self) -> None:
        """A step: the next input is fetched while this one computes."""
        made = self._made
        self._ready = self._sent = 0
        self._computed = False
        seconds = self._slowness * (made.fixed_s + made.per_sample_s * self._samples)
        seconds *= self._random.lognormvariate(0.0, made.noise)
        backward = seconds * (1.0 - made.forward) / made.buckets
        for bucket in range(made.buckets):
            is_last = bucket == made.buckets - 1
            self._transfers.after(
                seconds * made.forward + backward * (bucket + 1), lambda last=is_last: self._got(last)
            )
        self._fetched = made.input_bytes == 0.0
        if not self._fetched:
            waiting = _Countdown(len(self._devices), self._has_input)
            for device in self._devices:
                self._transfers.send(self._routes(-1, device), made.input_bytes * self._samples, waiting)

    def _has_input(self) -> None:
        self._fetched = True
        self._end_if_done()

    def _got(self, is_last: bool) -> None:
        self._ready += 1
        self._computed = self._computed or is_last
        self._send_next()

    def _send_next(self) -> None:
        if len(self._devices) == 1:
            self._sent = self._ready
        elif not self._is_sending and self._sent < self._ready:
            self._is_sending = True
            amount = self._made.gradient_bytes / self._made.buckets
            exchange = {"ring": _ring, "tree": _tree, "server": _server}[self._made.exchange]
            exchange(self._transfers, self._routes, self._devices, amount, self._exchanged)
            return
        self._end_if_done()

    def _exchanged(self) -> None:
        self._is_sending = False
        self._sent += 1
        self._send_next()

    def _end_if_done(self) -> None:
        if self._fetched and self._computed and self._sent == self._made.buckets:
            self._computed = False
            self.ends.append(self._transfers.now)
            self._begin()


class _Countdown:
    """Calls once it has been called so many times."""

    def __init__(self, number: int, then: Then) -> None:
        self._left = number
        self._then = then

    def __call__(self) -> None:
        self._left -= 1
        if not self._left:
            self._then()


def _ring(transfers: Transfers, routes: Routes, devices: Sequence[int], amount: float, then: Then) -> None:
    """Nobody waits for a round: a device sends a chunk on when it has come and the one before is away."""
    num = len(devices)
    rounds = 2 * (num - 1)
    finished = _Countdown(num, then)
    came = [0] * num  # chunks that may be sent on; the first is one's own
    sent = [0] * num
    is_sending = [False] * num

    def go(place: int) -> None:
        if is_sending[place] or sent[place] == rounds or came[place] < sent[place]:
            return
        is_sending[place] = True
        after = (place + 1) % num

        def arrived() -> None:
            is_sending[place] = False
            sent[place] += 1
            came[after] += 1
            if sent[place] == rounds:
                finished()
            go(place)
            go(after)

        transfers.send(routes(devices[place], devices[after]), amount / num, arrived)

    for place in range(num):
        go(place)


def _tree(transfers: Transfers, routes: Routes, devices: Sequence[int], amount: float, then: Then) -> None:
    """Up a binary tree over neighbouring places, then down: each device as soon as it has what it needs."""
    num = len(devices)
    children: list[list[int]] = [[] for _ in range(num)]
    parent = [0] * num
    reach = 1
    while reach < num:
        for place in range(0, num - reach, 2 * reach):
            children[place].append(place + reach)
            parent[place + reach] = place
        reach *= 2
    finished = _Countdown(num - 1, then)

    def down(place: int) -> None:
        for child in reversed(children[place]):

            def got(child: int = child) -> None:
                finished()
                down(child)

            transfers.send(routes(devices[place], devices[child]), amount, got)

    def up(place: int) -> None:
        if place:
            transfers.send(routes(devices[place], devices[parent[place]]), amount, gathered[parent[place]])
        else:
            down(0)

    gathered = [_Countdown(len(children[place]), lambda place=place: up(place)) for place in range(num)]
    for place in range(num):
        if not children[place]:
            up(place)


def _server(transfers: Transfers, routes: Routes, devices: Sequence[int], amount: float, then: Then) -> None:
    """All send to the first device, which sends to all."""
    first, *others = devices
    pulled = _Countdown(len(others), then)

    def pull() -> None:
        for device in others:
            transfers.send(routes(first, device), amount, pulled)

    pushed = _Countdown(len(others), pull)
    for device in others:
        transfers.send(routes(device, first), amount, pushed)
