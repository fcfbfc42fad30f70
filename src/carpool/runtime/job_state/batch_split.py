"""Batch split: how a step is divided over devices and into micro-batches, with its learning-rate gain; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from carpool.jobs.devices import LocalDevice
from carpool.runtime.job_state.actions import BatchSplit, MicroBatchLimit
from carpool.runtime.job_state.proportional_split import (
    WORTH,
    DeviceShare,
    DeviceSpeeds,
    is_worth_it,
    split_proportionally,
)
from carpool.runtime.job_state.types import JobOptions, ProcessGroupEpoch, StepLayout, Target, WorkerSlot
from carpool.runtime.job_state.update_sharding import Ranges, UpdateShardingPlanner
from carpool.runtime.process.protocol import Contributed, Ready, WorkerFailed
from carpool.runtime.reduce.shards import MicroBatchLimits, max_micro_batch


class LearningRateGain:
    """With a batch m: m/m0·(φ + m0)/(φ + m) steps with the own m0, if the learning rate grows by as much.

    φ is the gradient noise scale; this is the gain of AdaScale (Johnson et al., ICML 2020). It is fixed when a batch is
    first used, from the noise that is known then: a learning rate that followed every report would make the noise of
    reports part of the training.
    """

    def __init__(self) -> None:
        self._noise: float | None = None
        self._of: dict[tuple[int, int], float] = {}

    def hear(self, noise: float | None) -> None:
        """The noise scale as a worker has measured it; None: it cannot tell."""
        self._noise = self._noise if noise is None else noise

    def of(self, batch_size: int, own: int) -> float:
        """In steps with the own batch; 0: nobody knows yet."""
        if batch_size == own:
            return 1.0
        if (batch_size, own) not in self._of and self._noise is not None:
            self._of[batch_size, own] = batch_size / own * (self._noise + own) / (self._noise + batch_size)
        return self._of.get((batch_size, own), 0.0)


_MOST_FAILURES = 10  # after which what was measured may be long out of date


@dataclass(slots=True)
class _BestSplit:
    """The quickest cut that has been measured on some seats, and how often another one proved worse."""

    counts: tuple[int, ...]
    slowest_s: float  # the longest pass
    failures: int = 0


class BatchSplitter:
    """Decides the shape of formations.

    In default mode the cut of a step is part of what is learned, so cuts are recorded with the step from which they
    hold, and steps that are made again (after a crash) are cut as the first time.
    """

    def __init__(self, devices: Mapping[int, LocalDevice], rules: JobOptions, cuts: Sequence[BatchSplit]) -> None:
        self._devices = devices
        self._rules = rules
        self._cuts = list(cuts)
        self._speeds = DeviceSpeeds()
        self._divider = UpdateShardingPlanner(rules.division)
        self._last: StepLayout | None = None
        self._ordered: tuple[int, ...] = ()  # counts that an order asked for, as long as they hold
        self._best: dict[tuple[tuple[WorkerSlot, ...], int], _BestSplit] = {}  # by seats and batch size
        self.ready: Ready | None = None  # what the job's workers said of the training
        self.gains = LearningRateGain()

    def shape(
        self,
        wish: Target,
        seats: tuple[WorkerSlot, ...],
        step: int,
        *,
        by_token: bool,
        now: ProcessGroupEpoch | None,
        is_new: bool,
    ) -> StepLayout:
        """How these seats should make the next step; like ``now`` unless a change is worth it.

        ``is_new`` says that the step has never been made before.
        """
        batch = self.batch_size(wish, len(seats))
        if len(seats) == 1:
            return StepLayout(seats, (), batch, by_token)
        if self._rules.sync_batchnorm:
            by_token = False  # a part that waits for its turn would keep the others waiting in the middle of theirs
        updates = self._updates(seats) if not by_token else ()
        if len(wish.parts) == len(seats) and seats == wish.seats:
            self._ordered = wish.parts
            return StepLayout(seats, wish.parts, batch, by_token, updates)
        same = now is not None and now.shape.seats == seats and now.shape.batch_size == batch
        present = now.shape.counts if now is not None and same else ()
        return StepLayout(seats, self._counts(seats, step, batch, present, is_new=is_new), batch, by_token, updates)

    def _updates(self, seats: tuple[WorkerSlot, ...]) -> Ranges:
        """Who updates which parameters; whoever does, the bits are the same."""
        if self.ready is None or not self.ready.may_split or self._rules.reducer == "group":
            return ()  # what is exchanged lies in shared memory
        return self._divider.ranges(self.ready.sizes, [self.trait(seat) for seat in seats])

    def _counts(
        self, seats: tuple[WorkerSlot, ...], step: int, batch: int, present: tuple[int, ...], *, is_new: bool
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
            counts = split_proportionally(self._rules.shards, speeds, 1)
        else:
            counts = split_proportionally(
                batch, speeds, 2 if self.ready is not None and self.ready.has_batch_norm else 1
            )
        return self._tried((seats, batch), present, counts, speeds) if present else counts

    def _tried(
        self,
        where: tuple[tuple[WorkerSlot, ...], int],
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
            best = self._best[where] = _BestSplit(present, slowest_s)
        elif best.counts == present or slowest_s <= best.slowest_s:
            best.counts, best.slowest_s = present, slowest_s
        elif slowest_s > (1.0 + WORTH) * best.slowest_s:
            return best.counts
        return wanted if is_worth_it(present, wanted, speeds) else present

    def record(self, step: int, shape: StepLayout) -> BatchSplit | None:
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
        cut = BatchSplit(step, shape.devices, shape.counts)
        held = [known for known in self._cuts if known.step <= step]
        if held and replace(held[-1], step=step) == cut:
            return None
        self._cuts = [known for known in self._cuts if known.step < step]
        self._cuts.append(cut)
        return cut

    def _recorded(self, step: int, seats: tuple[WorkerSlot, ...]) -> tuple[int, ...]:
        """The parts that held at a step when it was made before on these devices; empty if it was not."""
        held = [cut for cut in self._cuts if cut.step <= step]
        is_same = held and held[-1].devices == tuple(seat.device for seat in seats)
        return held[-1].parts if is_same else ()

    def measure(self, seat: WorkerSlot, said: Contributed) -> None:
        """A worker's pass, and its update before, took so long."""
        trait = self.trait(seat)
        self._speeds.measure(trait, said.seconds, said.samples)
        self._divider.measure(trait, said.update_s, said.copy_s)

    def passed(self, shape: StepLayout, between_s: float) -> None:
        """A step in this shape took so long beside its longest pass."""
        self._divider.passed([self.trait(seat) for seat in shape.seats], shape.updates, between_s)

    def gain(self, wish: Target, size: int) -> float:
        """What a step counts for beside one with the training's own batch on as many devices."""
        return self.gains.of(self.batch_size(wish, size), self.batch_size(replace(wish, batch_size=0), size))

    def batch_size(self, wish: Target, size: int) -> int:
        """Samples per step on so many devices."""
        assert self.ready is not None
        own = wish.batch_size or self._rules.batch_size or self.ready.batch_size
        return min(own * size, self.ready.num_samples) if self._rules.batch_per_device else own

    def trait(self, seat: WorkerSlot) -> DeviceShare:
        """What a seat's speed depends on."""
        device = self._devices[seat.device]
        trait = (device.kind, seat.fraction)
        self._speeds.guess(trait, max(1, len(device.cores)) * seat.fraction)
        return trait

    def threads(self, seat: WorkerSlot) -> int:
        """Threads that a share of a device allows; on a GPU, as many as cores were asked for."""
        device = self._devices[seat.device]
        return max(1, self._rules.cpus if device.cuda is not None else round(seat.fraction * len(device.cores)))


# A step's gradient is a mean over samples, so passes over a few samples each, weighted by how many, add up to the same
# gradient; only the rounding differs. That is why exact jobs are not split, and batch-normalised ones are not because
# their statistics would be taken over fewer samples. Steps before the first split stay whole when they are made again.


@dataclass(frozen=True, slots=True)
class MemoryShortage:
    """A step that ran out of memory on a device although its neighbours stood still."""

    said: WorkerFailed
    device: LocalDevice
    batch_size: int

    @property
    def words(self) -> str:
        """What happened, with the memory that there is."""
        size = f" ({self.device.memory_bytes / 2**30:.1f} GiB)" if self.device.memory_bytes else ""
        what = f"step {self.said.step + 1} of {self.batch_size} samples"
        return f"{what} needs more memory than {self.device.name} has{size}, even alone: {self.said.error}."


class MicroBatching:
    """How a job's steps have been split so far."""

    def __init__(self, known: Sequence[MicroBatchLimit] = ()) -> None:
        self._known = list(known)

    @property
    def limits(self) -> MicroBatchLimits:
        """For the workers."""
        return tuple((split.step, split.samples) for split in self._known)

    def halve(self, step: int, samples: int) -> MicroBatchLimit | None:
        """Split the passes over so many samples once more, from a step on; None: there is nothing to split."""
        now = min(max_micro_batch(self.limits, step) or samples, samples)
        if now < 2:
            return None
        split = MicroBatchLimit(step, -(-now // 2))
        self._known.append(split)
        return split


def why_not_split(short: MemoryShortage, rules: JobOptions, ready: Ready | None) -> str:
    """Why a job must fail where others would be split, with a way out; empty: it may be split."""
    if not short.said.samples:
        why = "It was not a pass over its samples: evaluate in smaller batches, or choose a smaller model."
    elif rules.exact:
        why = "An exact job is not split into micro-steps, which would change its bits: {lower}, or set exact = false."
    elif ready is not None and ready.has_batch_norm:
        why = "A batch-normalised job is not split into micro-steps, which would change its statistics: {lower}."
    elif not rules.splits:
        why = "Steps are not split into micro-steps here: {lower}."
    else:
        return ""
    return f"{short.words} " + why.format(lower=f"lower batch_size ({short.batch_size})")
