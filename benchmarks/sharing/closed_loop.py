"""The policy itself, choosing shares for seats: its world is a GPU, and rates are measured when they are asked for.

Time is simulated; a rate is what the seats showed in one window under these shares. So `competitive` decides as it does
in ``carpool run``, without waiting for processes that start anew at every change of a share.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from sharing.mixes import Mix
from sharing.room import Room

from carpool.backends.live import Live
from carpool.core.estimates import Estimator
from carpool.core.messages import Record
from carpool.core.model import JobId, JobSpec
from carpool.core.topology import Cluster, Placement
from carpool.policies.competitive import Competitive
from carpool.sim.traces.trace import Arrival
from carpool.sim.world import Pace, PlainWorld
from carpool.testing import drive

_KIND = "H200"
_LONG = 1e7  # steps: nobody ends before shares are chosen


class Kept(Exception):
    """The policy has settled for shares, in percent; for none where it gave the mix up."""

    def __init__(self, shares: tuple[int, ...]) -> None:
        super().__init__(f"keeps {shares}")
        self.shares = shares


@dataclass(frozen=True, slots=True)
class Choice:
    """What the policy chose, and what that took."""

    shares: tuple[int, ...]
    rates: tuple[float, ...]
    vectors: int  # that were measured
    measuring_s: float
    cpu_s: float  # of deciding


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomWorld(PlainWorld):
    """A device whose rates are measured on the seats of a room."""

    room: Room
    mix: Mix
    seconds: float
    known: dict[tuple[int, ...], list[float]] = field(default_factory=dict)  # shares (0: not there) -> samples/s

    def pace(self, spec: JobSpec, done: float, placement: Placement) -> Pace:
        """Steps per second beside the present neighbours."""
        place = _place(spec)
        shares = [0] * len(self.mix.tasks)
        shares[place] = round(100 * placement.fraction)
        for other in placement.neighbours:
            shares[_place(other.spec)] = round(100 * other.fraction)
        return Pace(self.measured(tuple(shares))[place] / self.mix.tasks[place].batch)

    def measured(self, shares: tuple[int, ...]) -> list[float]:
        """Samples per second of those who are there; a pair or more gets a longer window."""
        if shares not in self.known:
            guests = [guest for guest in self.mix.at(*shares) if guest.share]
            rates = iter(self.room.run(guests, self.seconds if len(guests) > 1 else self.seconds / 2))
            self.known[shares] = [next(rates) if share else 0.0 for share in shares]
        return self.known[shares]

    def estimator(self) -> Estimator:
        """That of a live run: it knows nothing."""
        live = Live(Cluster.build([(1, 1, _KIND)]))
        live.has_company = lambda job: True
        return live


class _Watch:
    """Ends the simulation when the policy has settled."""

    def record(self, record: Record) -> None:
        reason = record.planned.reason if record.planned is not None else ""
        for words in reason.split("; "):
            if words.startswith("keeps "):
                raise Kept(tuple(int(part.rstrip("%")) for part in words.split()[1].split("/")))
            if " waits: together" in words:
                raise Kept(())


def choose(room: Room, mix: Mix, levels: Sequence[int], seconds: float, tries: int = 6) -> Choice:
    """What `competitive` chooses for a mix that is there as a whole, among these levels."""
    world = RoomWorld(room=room, mix=mix, seconds=seconds)
    count = len(mix.tasks)
    policy = Competitive(levels=tuple(level / 100 for level in levels), most=count, tries=tries)
    arrivals = [Arrival(0.0, JobSpec(JobId(f"j{place}"), 1, _LONG)) for place in range(count)]
    before, cpu_s = room.measured_s, time.process_time()
    try:
        drive(policy, Cluster.build([(1, 1, _KIND)]), arrivals, world, report_every_s=0.4, observers=(_Watch(),))
    except Kept as kept:
        shares = kept.shares
    else:
        shares = ()
    rates = tuple(world.measured(shares)) if shares else (0.0,) * count
    vectors = sum(all(shares) for shares in world.known)
    return Choice(shares, rates, vectors, room.measured_s - before, time.process_time() - cpu_s)


def _place(spec: JobSpec) -> int:
    return int(spec.id.removeprefix("j"))
