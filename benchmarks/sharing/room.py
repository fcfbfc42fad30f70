"""Resident processes on one GPU: trainings at fixed shares, of which any few run at a time.

A process (colocation/seat.py) keeps its share, so trainings move between processes: loading one takes a second or two,
starting a process several.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, NamedTuple

from colocation.seat import Gone, Seat, Window, close_all
from colocation.tasks import Task

MOST_CLIENTS = 46  # of the 48 that the service serves on one GPU
PLAIN = 0  # the share of a process outside the service: the driver slices time between it and the others
_LOAD_S, _RUN_S, _LEAD = 120.0, 30.0, 1.5


class Guest(NamedTuple):
    """A training at a share, in percent; the `twin` tells several of the same apart.

    Its step is one bare graph, or `ours`: made by carpool's trainer, which may have taken over from another (`moved`).
    """

    task: Task
    share: int
    twin: int = 0
    ours: bool = False
    moved: bool = False


class Room:
    """Seats, and who sits on them."""

    def __init__(self, environment: Mapping[str, str], device: str = "cuda") -> None:
        self._environment = environment
        self._device = device
        self._seats: dict[Guest, Seat] = {}
        self._idle: list[Seat] = []
        self._step_s: dict[tuple[str, bool], float] = {}
        self._deterministic: bool | None = None
        self.measured_s = 0.0  # in windows, so far
        self.facts: dict[str, Any] = {}  # multiprocessors seen at each share, and what runs without a graph

    def __enter__(self) -> Room:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        close_all([*self._seats.values(), *self._idle])

    def invite(self, guests: Iterable[Guest], *, deterministic: bool = True) -> float:
        """Seat these guests, all at once, and send others away; the seconds it took."""
        began = time.monotonic()
        wanted = dict.fromkeys(guests)
        if deterministic != self._deterministic:
            self._leave(list(self._seats))
        self._deterministic = deterministic
        self._leave([guest for guest in self._seats if guest not in wanted])
        self.seat(wanted)
        return time.monotonic() - began

    def seat(self, guests: Iterable[Guest]) -> None:
        """Seat these guests too, under the settings of the others."""
        deterministic = bool(self._deterministic)
        missing = [guest for guest in dict.fromkeys(guests) if guest not in self._seats]
        self._make_room(missing)
        for guest in missing:
            self._seats[guest] = self._seat(guest.share)
            how = (
                ("train", guest.task, deterministic, guest.moved) if guest.ours else ("load", guest.task, deterministic)
            )
            self._seats[guest].ask(*how)
        for guest, found in zip(missing, self._answers(missing, _LOAD_S), strict=True):
            self._note(guest, found)

    def run(self, guests: Sequence[Guest], seconds: float = 1.0, *, eager: bool = False) -> list[float]:
        """Samples per second of each guest, all of them running at once."""
        longest = max(self._step_s.get((guest.task.name, eager), 0.05) for guest in guests) * len(guests)
        start = time.monotonic() + 0.003
        count_from = start + max(0.05, _LEAD * longest)
        window = Window(start, count_from, count_from + max(seconds, 4.0 * longest))
        for guest in guests:
            self._seats[guest].ask("run", window, eager)
        rates = [float(found["steps_per_s"]) for found in self._answers(guests, _RUN_S)]
        self.measured_s += window.count_until - window.start
        if len(guests) == 1:
            self._step_s[guests[0].task.name, eager] = 1.0 / max(rates[0], 1e-6)
        return [rate * guest.task.batch for rate, guest in zip(rates, guests, strict=True)]

    def work(self, guests: Sequence[Guest], steps: Sequence[int], *, eager: bool = False) -> list[float]:
        """Seconds until each guest has made its steps, all of them starting at once."""
        start = time.monotonic() + 0.003
        for guest, count in zip(guests, steps, strict=True):
            self._seats[guest].ask("work", start, count, eager)
        return [float(found["seconds"]) for found in self._answers(guests, _RUN_S)]

    def mirror(self, guest: Guest, steps: int) -> dict[str, Any]:
        """What a mirror costs a guest of ours, alone."""
        self._seats[guest].ask("mirror", guest.task, steps)
        return self._answers([guest], _LOAD_S)[0]

    def kernels(self, guest: Guest, steps: int = 4) -> dict[str, list[float]]:
        """What a step of a guest has the device do, by name: how often, and µs."""
        self._seats[guest].ask("kernels", steps)
        found: dict[str, list[float]] = self._answers([guest], _LOAD_S)[0]["work"]
        return found

    # -------------------------------------------------------------------------------------------------------- inside
    def _answers(self, guests: Sequence[Guest], limit_s: float) -> list[dict[str, Any]]:
        """What they say, all of them heard whatever one says: the next question is answered by what belongs to it.

        One that cannot do it, or does not answer, has its seat taken away; then `Gone`.
        """
        found, problems = [], []
        for guest in guests:
            try:
                said = self._seats[guest].answer(limit_s)
            except Gone as gone:
                said = {"error": str(gone)}
            found.append(said)
            if "error" in said:
                problems.append(f"{guest.task.name} at {guest.share} %: {said['error'][:200]}")
                self._seats.pop(guest).process.kill()
        if problems:
            raise Gone("; ".join(problems))
        return found

    def _leave(self, guests: Iterable[Guest]) -> None:
        leaving = list(guests)
        for guest in leaving:
            self._seats[guest].ask("clear")
        with suppress(Gone):  # who cannot even leave is gone
            self._answers(leaving, _LOAD_S)
        self._idle += [self._seats.pop(guest) for guest in leaving if guest in self._seats]

    def _make_room(self, guests: Sequence[Guest]) -> None:
        """End idle seats that nobody will sit on, where the service would have too many clients."""
        needed = [guest.share for guest in guests]
        for seat in list(self._idle):
            clients = sum(s.share != PLAIN for s in (*self._seats.values(), *self._idle))
            if seat.share in needed:
                needed.remove(seat.share)
            elif clients + sum(share != PLAIN for share in needed) > MOST_CLIENTS:
                self._idle.remove(seat)
                seat.close()

    def _seat(self, share: int) -> Seat:
        found = next((seat for seat in self._idle if seat.share == share), None)
        if found is None:
            return Seat(share, {} if share == PLAIN else self._environment, self._device)
        self._idle.remove(found)
        return found

    def _note(self, guest: Guest, found: Mapping[str, Any]) -> None:
        if guest.share != PLAIN:
            self.facts.setdefault("multiprocessors", {})[str(guest.share)] = found["sms"]
        if not found["graph"]:
            self.facts.setdefault("without_graph", {})[guest.task.name] = found.get("note", "")
