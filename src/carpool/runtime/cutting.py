"""How a job's steps are cut over its seats: by order, by speed, or as when they were made before; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from carpool.runtime.actions import Cut
from carpool.runtime.crew import Formation, Rules, Seat, Shape, Wish
from carpool.runtime.dealing import WORTH, Speeds, Trait, deal, is_worth_it
from carpool.runtime.devices import LocalDevice
from carpool.runtime.divider import Divider
from carpool.runtime.division import Ranges
from carpool.runtime.gains import Gains
from carpool.runtime.protocol import Contributed, Ready

_MOST_FAILURES = 10  # after which what was measured may be long out of date


@dataclass(slots=True)
class _Best:
    """The quickest cut that has been measured on some seats, and how often another one proved worse."""

    counts: tuple[int, ...]
    slowest_s: float  # the longest pass
    failures: int = 0


class Cutter:
    """Decides the shape of formations.

    In default mode the cut of a step is part of what is learned, so cuts are recorded with the step from which they
    hold, and steps that are made again (after a crash) are cut as the first time.
    """

    def __init__(self, devices: Mapping[int, LocalDevice], rules: Rules, cuts: Sequence[Cut]) -> None:
        self._devices = devices
        self._rules = rules
        self._cuts = list(cuts)
        self._speeds = Speeds()
        self._divider = Divider(rules.division)
        self._last: Shape | None = None
        self._ordered: tuple[int, ...] = ()  # counts that an order asked for, as long as they hold
        self._best: dict[tuple[tuple[Seat, ...], int], _Best] = {}  # by seats and batch size
        self.ready: Ready | None = None  # what the job's workers said of the training
        self.gains = Gains()

    def shape(
        self, wish: Wish, seats: tuple[Seat, ...], step: int, *, by_token: bool, now: Formation | None, is_new: bool
    ) -> Shape:
        """How these seats should make the next step; like ``now`` unless a change is worth it.

        ``is_new`` says that the step has never been made before.
        """
        batch = self.batch_size(wish, len(seats))
        if len(seats) == 1:
            return Shape(seats, (), batch, by_token)
        if self._rules.sync_batchnorm:
            by_token = False  # a part that waits for its turn would keep the others waiting in the middle of theirs
        updates = self._updates(seats) if not by_token else ()
        if len(wish.parts) == len(seats) and seats == wish.seats:
            self._ordered = wish.parts
            return Shape(seats, wish.parts, batch, by_token, updates)
        same = now is not None and now.shape.seats == seats and now.shape.batch_size == batch
        present = now.shape.counts if now is not None and same else ()
        return Shape(seats, self._counts(seats, step, batch, present, is_new=is_new), batch, by_token, updates)

    def _updates(self, seats: tuple[Seat, ...]) -> Ranges:
        """Who updates which parameters; whoever does, the bits are the same."""
        if self.ready is None or not self.ready.may_split or self._rules.reducer == "group":
            return ()  # what is exchanged lies in shared memory
        return self._divider.ranges(self.ready.sizes, [self.trait(seat) for seat in seats])

    def _counts(
        self, seats: tuple[Seat, ...], step: int, batch: int, present: tuple[int, ...], *, is_new: bool
    ) -> tuple[int, ...]:
        recorded = self._recorded(step, seats)
        if not is_new and (recorded or present):
            return recorded or present
        last = self._last
        if not present and last is not None and (last.seats, last.batch_size) == (seats, batch):
            present = last.counts
        elif not present and sum(recorded) == batch:
            present = recorded
        speeds = [self._speeds.of(self.trait(seat)) for seat in seats]
        if self._rules.exact:
            counts = deal(self._rules.shards, speeds, 1)
        else:
            counts = deal(batch, speeds, 2 if self.ready is not None and self.ready.has_batch_norm else 1)
        return self._tried((seats, batch), present, counts, speeds) if present else counts

    def _tried(
        self,
        where: tuple[tuple[Seat, ...], int],
        present: tuple[int, ...],
        wanted: tuple[int, ...],
        speeds: Sequence[float],
    ) -> tuple[int, ...]:
        """The wanted counts if they promise enough; back to the best ones known if the present ones proved worse.

        Speeds are taken not to depend on the parts. Where they do (devices that have cores or a memory bus in common),
        dealing by them can make things worse: then it is tried again after twice as many passes each time.
        """
        traits = [self.trait(seat) for seat in where[0]]
        best = self._best.get(where)
        if not self._speeds.are_settled(traits, 2**best.failures if best is not None and best.counts == present else 1):
            return wanted if present == self._ordered else present  # an order that holds no more is left at once
        slowest_s = max(count / speed for count, speed in zip(present, speeds, strict=True))
        if best is None:
            best = self._best[where] = _Best(present, slowest_s)
        elif best.counts == present or slowest_s <= best.slowest_s:
            best.counts, best.slowest_s = present, slowest_s
        elif slowest_s > (1.0 + WORTH) * best.slowest_s:
            return best.counts
        return wanted if is_worth_it(present, wanted, speeds) else present

    def record(self, step: int, shape: Shape) -> Cut | None:
        """Remember how steps are cut from here on; the cut, if it is news."""
        best, last, self._last = self._best.get((shape.seats, shape.batch_size)), self._last, shape
        if best is not None and last is not None and last.seats == shape.seats and last.counts != shape.counts:
            went_back = shape.counts == best.counts and self._ordered not in {last.counts, shape.counts}
            best.failures = min(best.failures + went_back, _MOST_FAILURES)
        if shape.counts != self._ordered:
            self._ordered = ()
        self._speeds.passes.clear()
        if self._rules.exact:
            return None
        cut = Cut(step, shape.devices, shape.counts)
        held = [known for known in self._cuts if known.step <= step]
        if held and replace(held[-1], step=step) == cut:
            return None
        self._cuts = [known for known in self._cuts if known.step < step]
        self._cuts.append(cut)
        return cut

    def _recorded(self, step: int, seats: tuple[Seat, ...]) -> tuple[int, ...]:
        """The parts that held at a step when it was made before on these devices; empty if it was not."""
        held = [cut for cut in self._cuts if cut.step <= step]
        is_same = held and held[-1].devices == tuple(seat.device for seat in seats)
        return held[-1].parts if is_same else ()

    def measure(self, seat: Seat, said: Contributed) -> None:
        """A worker's pass, and its update before, took so long."""
        trait = self.trait(seat)
        self._speeds.measure(trait, said.seconds, said.samples)
        self._divider.measure(trait, said.update_s, said.copy_s)

    def passed(self, shape: Shape, between_s: float) -> None:
        """A step in this shape took so long beside its longest pass."""
        self._divider.passed([self.trait(seat) for seat in shape.seats], shape.updates, between_s)

    def gain(self, wish: Wish, size: int) -> float:
        """What a step counts for beside one with the training's own batch on as many devices."""
        return self.gains.of(self.batch_size(wish, size), self.batch_size(replace(wish, batch_size=0), size))

    def batch_size(self, wish: Wish, size: int) -> int:
        """Samples per step on so many devices."""
        assert self.ready is not None
        own = wish.batch_size or self._rules.batch_size or self.ready.batch_size
        return min(own * size, self.ready.num_samples) if self._rules.batch_per_device else own

    def trait(self, seat: Seat) -> Trait:
        """What a seat's speed depends on."""
        device = self._devices[seat.device]
        trait = (device.kind, seat.fraction)
        self._speeds.guess(trait, max(1, len(device.cores)) * seat.fraction)
        return trait

    def threads(self, seat: Seat) -> int:
        """Threads that a share of a device allows; on a GPU, as many as cores were asked for."""
        device = self._devices[seat.device]
        return max(1, self._rules.cpus if device.cuda is not None else round(seat.fraction * len(device.cores)))
