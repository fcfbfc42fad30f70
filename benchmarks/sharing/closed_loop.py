"""Runs `competitive` against resident processes on a GPU: rates are measured when the policy asks for them.

Time is simulated; a rate is what the processes showed in one window under these shares. So the policy decides as in
``carpool run``, without restarting processes at every change of a share.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from sharing.mixes import Mix
from sharing.room import Room

from carpool.backends.online_estimator import OnlineEstimator
from carpool.core.estimates import Estimator
from carpool.core.messages import Record
from carpool.core.model import JobId, JobSpec
from carpool.core.topology import Cluster, Placement
from carpool.policies.sharing.competitive import Competitive
from carpool.sim.traces.trace import Arrival
from carpool.sim.worlds.base import Pace, PlainWorld, TrainingSignals
from carpool.testing import drive

_KIND = "H200"
_LONG = 1e7  # steps: nobody ends before shares are chosen
_LARGEST = 8  # times its own batch that a small training may have, where batches are searched too
NOISE = 8.0  # gradient noise scale in own batches: an assumption, since nothing is learned here

Settings = tuple[tuple[int, int], ...]  # of each training: its share in percent (0: not there), its batch (0: its own)


class Kept(Exception):
    """The policy has settled for shares and batches; for none where it gave the mix up."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(f"keeps {settings}")
        self.settings = settings


@dataclass(frozen=True, slots=True)
class Choice:
    """What the policy chose, and what that took."""

    shares: tuple[int, ...]
    batches: tuple[int, ...]
    rates: tuple[float, ...]  # samples per second
    vectors: tuple[Settings, ...]  # that were measured
    measuring_s: float
    cpu_s: float  # of deciding


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomWorld(PlainWorld):
    """A device whose rates are measured on the seats of a room."""

    room: Room
    mix: Mix
    seconds: float
    known: dict[Settings, list[float]] = field(default_factory=dict)  # samples per second

    def pace(self, spec: JobSpec, done: float, placement: Placement) -> Pace:
        """Steps per second beside the present neighbours."""
        place = _place(spec)
        now = [(0, 0)] * len(self.mix.tasks)
        now[place] = round(100 * placement.fraction), placement.batch_size
        for other in placement.neighbours:
            now[_place(other.spec)] = round(100 * other.fraction), other.batch_size
        return Pace(self.measured(tuple(now))[place] / (placement.batch_size or self.mix.tasks[place].batch))

    def measured(self, now: Settings) -> list[float]:
        """Samples per second of those who are there; a pair or more gets a longer window."""
        if now not in self.known:
            batches = [batch or task.batch for (_, batch), task in zip(now, self.mix.tasks, strict=True)]
            tasks = [replace(task, batch=batch) for task, batch in zip(self.mix.tasks, batches, strict=True)]
            whole = replace(self.mix, tasks=tuple(tasks))
            guests = [guest for guest in whole.at(*[share for share, _ in now]) if guest.share]
            self.room.seat(guests)
            rates = iter(self.room.run(guests, self.seconds if len(guests) > 1 else self.seconds / 2))
            self.known[now] = [next(rates) if share else 0.0 for share, _ in now]
        return self.known[now]

    def signals(self, spec: JobSpec, done: float, placement: Placement) -> TrainingSignals:
        """The noise that is assumed."""
        return TrainingSignals(noise=NOISE * spec.batch_size)

    def estimator(self) -> Estimator:
        """That of a live run: it knows nothing."""
        live = OnlineEstimator(Cluster.build([(1, 1, _KIND)]))
        live.has_company = lambda job: True
        return live


class _Watch:
    """Ends the simulation when the policy has settled."""

    def record(self, record: Record) -> None:
        reason = record.planned.reason if record.planned is not None else ""
        for words in reason.split("; "):
            if words.startswith("keeps "):
                vector, _, _ = words.removeprefix("keeps ").partition(" on ")
                raise Kept(tuple(_setting(part) for part in vector.split("/")))
            if " waits: sharing" in words:
                raise Kept(())


def choose(
    room: Room, mix: Mix, levels: Sequence[int], seconds: float, *, tries: int = 6, batches: bool = False
) -> Choice:
    """What `competitive` chooses for a mix that is there as a whole, among these levels; batches too if asked."""
    world = RoomWorld(room=room, mix=mix, seconds=seconds)
    count = len(mix.tasks)
    policy = Competitive(levels=tuple(level / 100 for level in levels), most=count, tries=tries)
    arrivals = [Arrival(0.0, _spec(mix, place, batches=batches)) for place in range(count)]
    before, cpu_s = room.measured_s, time.process_time()
    try:
        drive(policy, Cluster.build([(1, 1, _KIND)]), arrivals, world, report_every_s=0.2, observers=(_Watch(),))
    except Kept as kept:
        settings = kept.settings
    else:
        settings = ()
    rates = tuple(world.measured(settings)) if settings else (0.0,) * count
    vectors = tuple(now for now in world.known if all(share for share, _ in now))
    own = [task.batch for task in mix.tasks]
    return Choice(
        tuple(share for share, _ in settings),
        tuple(batch or size for (_, batch), size in zip(settings, own, strict=False)),
        rates,
        vectors,
        room.measured_s - before,
        time.process_time() - cpu_s,
    )


def _spec(mix: Mix, place: int, *, batches: bool) -> JobSpec:
    own = mix.tasks[place].batch
    return JobSpec(
        JobId(f"j{place}"), 1, _LONG, batch_size=own, batch_range=(own, _LARGEST * own) if batches and place else None
    )


def _place(spec: JobSpec) -> int:
    return int(spec.id.removeprefix("j"))


def _setting(words: str) -> tuple[int, int]:
    """Such as ``60%`` or ``60% with batch size 128``."""
    share, _, batch = words.partition("% with batch size ")
    return int(share.rstrip("%")), int(batch or 0)
