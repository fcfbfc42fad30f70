"""Warm pool: keeps prewarmed processes on each GPU and assigns them to new workers.

A share of a GPU binds a process when it starts, so a seat fits jobs of one lane only. The lanes that were asked for
last are those that are kept: whole ones at first. A seat takes up a CUDA context and no more, and is given up whenever
somebody needs the memory, the place or the quiet.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from carpool.jobs.devices import LocalDevice
from carpool.runtime.process.protocol import Begin, Message, Prewarm, Prewarmed, WorkerFailed
from carpool.runtime.process.worker_pool import WorkerKey
from carpool.runtime.sharing.lanes import MAX_MPS_CLIENTS, WHOLE

_NO_JOB = ""  # the job of a seat's key: no job has an empty name
_REFILL_S = 1.0  # after a start on the device: whoever has just started shall not wait for us
_QUIET_S = 5.0  # that a measurement takes at most, as a rule
_CHANGE_S = 10.0  # without a start, before a seat gives way to one of another lane: a search tries many
_REST_S = 30.0  # after seats were given up for somebody's memory
_WARM_WITHIN_S = 60.0  # else something holds it up that it does not know of
_MOST_FAILURES = 3  # of a device's seats, one after another
# What is read when torch, CUDA or its libraries start; a job that sets one of these needs a process of its own.
_READ_AT_START = ("CUDA", "CUBLAS", "CUDNN", "NCCL", "NVIDIA", "PYTORCH", "TORCH", "OMP_", "MKL_", "LD_")


class WorkerStarter(Protocol):
    """Who makes processes; `staff.Staff` does."""

    def begin(self, key: WorkerKey, begin: Begin, log: int, *beside: int) -> None:
        """Start a worker in a new process."""
        ...

    def seat(self, key: WorkerKey, warm: Prewarm) -> None:
        """Start a process for a job that is not known yet."""
        ...

    def hand_over(self, seat: WorkerKey, key: WorkerKey, begin: Begin, log: int, *beside: int) -> None:
        """Make a seated process a worker."""
        ...

    def kill(self, key: WorkerKey) -> None:
        """End a process."""
        ...


@dataclass(slots=True, eq=False)
class _WarmProcess:
    key: WorkerKey
    lane: int
    environment: Mapping[str, str]
    since: float
    is_warm: bool = False
    is_leaving: bool = False
    held: str = ""  # what it holds and how long that took, in words


@dataclass(slots=True, eq=False)
class _Place:
    """One GPU."""

    device: LocalDevice
    asked: deque[int]  # lanes, the newest last
    busy_until: float
    workers: set[WorkerKey] = field(default_factory=set)
    seats: list[_WarmProcess] = field(default_factory=list)
    failures: int = 0

    def staying(self) -> list[_WarmProcess]:
        return [seat for seat in self.seats if not seat.is_leaving]


class WarmPool:
    """The seats of one executor."""

    def __init__(
        self,
        starter: WorkerStarter,
        devices: Mapping[int, LocalDevice],  # where seats are kept
        size: int,  # on each of them
        environment: Callable[[int, int], Mapping[str, str]],  # of a device and a lane
        is_open: Callable[[int], bool],  # whether a seat may be on a device
        clock: Callable[[], float],
        heartbeat_s: float = 0.5,
    ) -> None:
        self._starter = starter
        self._size = size
        self._environment = environment
        self._is_open = is_open
        self._clock = clock
        self._heartbeat_s = heartbeat_s
        self._numbers = 0
        quiet_at = clock() + _REFILL_S
        self._places = {
            number: _Place(device, deque([WHOLE] * size, maxlen=size), quiet_at) for number, device in devices.items()
        }

    def begin(self, key: WorkerKey, device: int, lane: int, begin: Begin, log: int, *beside: int) -> str:
        """Start a worker: on a seat where one fits, else in a new process; what it was given, for its story."""
        place = self._places.get(device)
        if place is None:
            self._starter.begin(key, begin, log, *beside)
            return ""
        place.asked.append(lane)
        place.busy_until = self._clock() + _REFILL_S
        place.workers.add(key)
        seat = self._fitting(place, begin)
        if seat is None:
            self._make_way(place)
            self._starter.begin(key, begin, log, *beside)
            return ""
        place.seats.remove(seat)
        self._starter.hand_over(seat.key, key, begin, log, *beside)
        return f"started in a process that was kept warm on {place.device.name}, {seat.held}"

    def tick(self) -> None:
        """Time has passed: give up seats that fit nobody, and make one that is missing."""
        for number, place in self._places.items():
            if not self._size or place.failures >= _MOST_FAILURES:
                continue
            if not self._is_open(number):
                self._dismiss(place.staying())
                continue
            self._dismiss([seat for seat in place.staying() if seat.environment != self._lane(number, seat.lane)])
            self._lose_patience(place)
            self._refill(number, place)

    def drop(self, device: int) -> list[WorkerKey]:
        """Give up all seats on a device, for a while; the processes that are about to end there."""
        place = self._places.get(device)
        if place is None:
            return []
        place.busy_until = self._clock() + _REST_S
        self._dismiss(place.staying())
        return [seat.key for seat in place.seats]

    def hush(self, device: int) -> None:
        """Make no seat on a device for a while, and give up the one that is being made: it would be measured too."""
        if (place := self._places.get(device)) is not None:
            place.busy_until = max(place.busy_until, self._clock() + _QUIET_S)
            self._dismiss([seat for seat in place.staying() if not seat.is_warm])

    def owns(self, key: WorkerKey) -> bool:
        """Whether this is a seat, and nobody's worker."""
        return key[0] == _NO_JOB

    def heard(self, key: WorkerKey, message: Message) -> tuple[int, str]:
        """A seat said something; a device and what its jobs should know of it, if there is anything."""
        for number, place in self._places.items():
            for seat in place.seats:
                if seat.key == key and isinstance(message, Prewarmed):
                    seat.is_warm, seat.held, place.failures = True, _held(message), 0
                elif seat.key == key and isinstance(message, WorkerFailed) and not seat.is_leaving:
                    seat.is_leaving = True  # by itself
                    return number, self._failed(place, message.error)
        return -1, ""

    def silent(self, key: WorkerKey) -> None:
        """A seat has given no sign of life for too long."""
        self._dismiss([seat for place in self._places.values() for seat in place.seats if seat.key == key])

    def ended(self, key: WorkerKey, why: str) -> tuple[int, str] | None:
        """A process has ended; if it was a seat, its device and what jobs there should know, as in `heard`."""
        for number, place in self._places.items():
            place.workers.discard(key)
            for seat in place.seats:
                if seat.key == key:
                    place.seats.remove(seat)
                    return number, "" if seat.is_leaving else self._failed(place, why)
        return None

    def _lane(self, device: int, lane: int) -> Mapping[str, str]:
        return self._environment(device, lane)

    def _fitting(self, place: _Place, begin: Begin) -> _WarmProcess | None:
        named = begin.program.get("environment") or {}
        if any(name.startswith(_READ_AT_START) for name in named):
            return None
        fitting = [seat for seat in place.staying() if seat.is_warm and seat.environment == begin.environment]
        return fitting[0] if fitting else None

    def _refill(self, number: int, place: _Place) -> None:
        now, seats = self._clock(), place.staying()
        if now < place.busy_until or any(not seat.is_warm for seat in seats) or len(place.seats) > len(seats):
            return
        missing = Counter(place.asked) - Counter(seat.lane for seat in seats)
        if not missing:
            return
        if len(seats) < self._size and len(seats) + len(place.workers) < MAX_MPS_CLIENTS:
            self._add(number, place, next(lane for lane in reversed(place.asked) if lane in missing))
        elif now >= place.busy_until - _REFILL_S + _CHANGE_S:
            surplus = Counter(seat.lane for seat in seats) - Counter(place.asked)
            self._dismiss([seat for seat in seats if seat.lane in surplus][:1])

    def _lose_patience(self, place: _Place) -> None:
        limit = self._clock() - _WARM_WITHIN_S
        late = [seat for seat in place.staying() if not seat.is_warm and seat.since < limit]
        for _ in late:
            self._failed(place, "it did not become warm")
        self._dismiss(late)

    def _add(self, number: int, place: _Place, lane: int) -> None:
        self._numbers += 1
        seat = _WarmProcess((_NO_JOB, self._numbers), lane, self._lane(number, lane), self._clock())
        place.seats.append(seat)
        device = place.device
        name = "cpu" if device.cuda is None else f"cuda:{device.cuda}"
        self._starter.seat(seat.key, Prewarm(name, device.cores, self._heartbeat_s, seat.environment))

    def _make_way(self, place: _Place) -> None:
        """A new process needs a place among the clients of MPS."""
        if len(place.seats) + len(place.workers) > MAX_MPS_CLIENTS:
            self._dismiss(place.staying()[:1])

    def _failed(self, place: _Place, why: str) -> str:
        place.failures += 1
        place.busy_until = self._clock() + _CHANGE_S
        is_last = place.failures == _MOST_FAILURES
        return f"no process is kept warm on {place.device.name}: {why}" if is_last else ""

    def _dismiss(self, seats: list[_WarmProcess]) -> None:
        for seat in seats:
            seat.is_leaving = True
            self._starter.kill(seat.key)


def _held(said: Prewarmed) -> str:
    memory = f"which took {said.memory_bytes / 2**20:.0f} MiB of it and " if said.memory_bytes else "which took "
    return f"{memory}{said.seconds:.1f} s" + "".join(f"; without {each}" for each in said.left_out)
