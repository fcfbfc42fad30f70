"""Batch split: how a step is divided over devices and into micro-batches, with its learning-rate gain; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from carpool.jobs.devices import LocalDevice, RemoteDevice
from carpool.runtime.job_state.actions import BatchSplit, MicroBatchLimit
from carpool.runtime.job_state.proportional_split import (
    MIN_GAIN,
    DeviceShare,
    DeviceSpeeds,
    is_worth_it,
    slowest_pass_s,
    split_proportionally,
)
from carpool.runtime.job_state.types import JobOptions, ProcessGroupEpoch, StepLayout, Target, WorkerSlot
from carpool.runtime.job_state.update_sharding import Ranges, UpdateShardingPlanner
from carpool.runtime.process.protocol import Contributed, Ready, WorkerFailed
from carpool.runtime.reduce.shards import MicroBatchLimits, max_micro_batch

_MAX_FAILURES = 10  # counted at most; each doubles the passes until a split that turned out slower is tried again

Slots = tuple[WorkerSlot, ...]


class LearningRateGain:
    """AdaScale's gain for a batch m: (m/m0)·(φ + m0)/(φ + m), with the job's own batch m0 and gradient noise scale φ.

    (Johnson et al., ICML 2020.) It is fixed when a batch size is first used: a learning rate that followed every report
    would feed the noise of the reports into the training.
    """

    def __init__(self) -> None:
        self._noise: float | None = None
        self._gains: dict[tuple[int, int], float] = {}

    def on_noise(self, noise: float | None) -> None:
        self._noise = self._noise if noise is None else noise

    def of(self, batch_size: int, own: int) -> float:
        """The gain; 0 while the noise is unknown."""
        if batch_size == own:
            return 1.0
        if (batch_size, own) not in self._gains and self._noise is not None:
            self._gains[batch_size, own] = batch_size / own * (self._noise + own) / (self._noise + batch_size)
        return self._gains.get((batch_size, own), 0.0)


@dataclass(slots=True)
class _BestSplit:
    """The fastest split measured on some slots, and how often another one turned out slower."""

    counts: tuple[int, ...]
    slowest_s: float  # the longest pass
    failures: int = 0


class BatchSplitter:
    """Decides the layout of epochs.

    In default mode the split of a step affects what is learned, so splits are recorded with the step from which they
    hold, and steps repeated after a crash are split as they were the first time.
    """

    def __init__(self, devices: Mapping[int, LocalDevice], options: JobOptions, splits: Sequence[BatchSplit]) -> None:
        self._devices = devices
        self._options = options
        self._splits = list(splits)
        self._speeds = DeviceSpeeds()
        self._update_sharding = UpdateShardingPlanner(options.update_sharding)
        self._last: StepLayout | None = None
        self._ordered: tuple[int, ...] = ()  # counts given by the order, while it is the newest
        self._best: dict[tuple[Slots, int], _BestSplit] = {}  # by slots and batch size
        self.ready: Ready | None = None  # what the job's workers reported about the training
        self.lr_gain = LearningRateGain()

    def layout(
        self,
        target: Target,
        slots: Slots,
        step: int,
        *,
        time_sliced: bool,
        current: ProcessGroupEpoch | None,
        is_new: bool,
    ) -> StepLayout:
        """The layout of the next step on these slots: that of the current epoch unless a change pays off.

        ``is_new`` means that the step has never been made before.
        """
        batch = self.batch_size(target, len(slots))
        if len(slots) == 1:
            return StepLayout(slots, (), batch, time_sliced)
        if self._options.sync_batchnorm:
            time_sliced = False  # a rank that waits for its turn would block the others in the middle of theirs
        update_ranges = () if time_sliced else self._update_ranges(slots)
        if len(target.parts) == len(slots) and slots == target.slots:
            self._ordered = target.parts
            return StepLayout(slots, target.parts, batch, time_sliced, update_ranges)
        now = None if current is None else current.layout
        in_use = now.counts if now is not None and (now.slots, now.batch_size) == (slots, batch) else ()
        counts = self._counts(slots, step, batch, in_use, is_new=is_new)
        return StepLayout(slots, counts, batch, time_sliced, update_ranges)

    def _update_ranges(self, slots: Slots) -> Ranges:
        """Which rank updates which parameters; the bits do not depend on it."""
        is_shared = self._options.reducer != "group" and not any(
            isinstance(self._devices[slot.device], RemoteDevice) for slot in slots
        )
        if self.ready is None or not self.ready.can_shard_update or not is_shared:
            return ()  # the exchange needs shared memory
        return self._update_sharding.ranges(self.ready.sizes, [self.device_share(slot) for slot in slots])

    def _counts(self, slots: Slots, step: int, batch: int, in_use: tuple[int, ...], *, is_new: bool) -> tuple[int, ...]:
        recorded = self._recorded(step, slots)
        if not is_new and (recorded or in_use):
            return recorded or in_use
        last = self._last
        if not in_use and last is not None and (last.slots, last.batch_size) == (slots, batch):
            in_use = last.counts
        elif not in_use and sum(recorded) == batch:
            in_use = recorded
        speeds = [self._speeds.of(self.device_share(slot)) for slot in slots]
        if self._options.exact:
            wanted = split_proportionally(self._options.shards, speeds, 1)
        else:
            has_batch_norm = self.ready is not None and self.ready.has_batch_norm
            wanted = split_proportionally(batch, speeds, 2 if has_batch_norm else 1)
        return self._improved((slots, batch), in_use, wanted, speeds) if in_use else wanted

    def _improved(
        self, where: tuple[Slots, int], in_use: tuple[int, ...], wanted: tuple[int, ...], speeds: Sequence[float]
    ) -> tuple[int, ...]:
        """The wanted counts if they promise enough; the best known ones if those in use turned out slower.

        Speeds are assumed not to depend on the counts. Where they do (devices that share cores or a memory bus), a
        proportional split can be slower: then it is tried again after twice as many passes each time.
        """
        shares = [self.device_share(slot) for slot in where[0]]
        best = self._best.get(where)
        times = 2**best.failures if best is not None and best.counts == in_use else 1
        if not self._speeds.are_settled(shares, times):
            return wanted if in_use == self._ordered else in_use  # counts from an expired order are dropped at once
        slowest_s = slowest_pass_s(in_use, speeds)
        if best is None:
            best = self._best[where] = _BestSplit(in_use, slowest_s)
        elif best.counts == in_use or slowest_s <= best.slowest_s:
            best.counts, best.slowest_s = in_use, slowest_s
        elif slowest_s > (1.0 + MIN_GAIN) * best.slowest_s:
            return best.counts
        return wanted if is_worth_it(in_use, wanted, speeds) else in_use

    def record(self, step: int, layout: StepLayout) -> BatchSplit | None:
        """Record how steps are split from here on. Returns the split if it is new."""
        best, last, self._last = self._best.get((layout.slots, layout.batch_size)), self._last, layout
        if best is not None and last is not None and last.slots == layout.slots and last.counts != layout.counts:
            went_back = layout.counts == best.counts and self._ordered not in {last.counts, layout.counts}
            best.failures = min(best.failures + went_back, _MAX_FAILURES)
        if layout.counts != self._ordered:
            self._ordered = ()
        self._speeds.passes.clear()
        if self._options.exact:
            return None
        split = BatchSplit(step, layout.devices, layout.counts)
        known = [earlier for earlier in self._splits if earlier.step <= step]
        if known and replace(known[-1], step=step) == split:
            return None
        self._splits = [*(earlier for earlier in self._splits if earlier.step < step), split]
        return split

    def same_split_until(self, step: int) -> int | None:
        """The first step after this one that was already made with other parts; None if there is none."""
        return min((split.step for split in self._splits if split.step > step), default=None)

    def _recorded(self, step: int, slots: Slots) -> tuple[int, ...]:
        """The parts with which a step was already made on these devices; empty if it was not."""
        known = [split for split in self._splits if split.step <= step]
        is_same = known and known[-1].devices == tuple(slot.device for slot in slots)
        return known[-1].parts if is_same else ()

    def on_pass(self, slot: WorkerSlot, message: Contributed) -> None:
        share = self.device_share(slot)
        self._speeds.measure(share, message.seconds, message.samples)
        self._update_sharding.measure(share, message.update_s, message.copy_s)

    def on_step(self, layout: StepLayout, sync_s: float) -> None:
        self._update_sharding.on_step([self.device_share(slot) for slot in layout.slots], layout.update_ranges, sync_s)

    def lr_gain_of(self, target: Target, size: int) -> float:
        return self.lr_gain.of(self.batch_size(target, size), self.batch_size(replace(target, batch_size=0), size))

    def batch_size(self, target: Target, size: int) -> int:
        assert self.ready is not None
        own = target.batch_size or self._options.batch_size or self.ready.batch_size
        most = self.ready.num_samples or own * size  # 0: a stream, whose length is unknown
        return min(own * size, most) if self._options.batch_per_device else own

    def device_share(self, slot: WorkerSlot) -> DeviceShare:
        """The key of a slot's speed; the first guess is the number of cores, of which an exact pass uses one."""
        device = self._devices[slot.device]
        share = (device.kind, slot.fraction)
        self._speeds.guess(share, 1.0 if self._options.exact else max(1, len(device.cores)) * slot.fraction)
        return share

    def threads(self, slot: WorkerSlot) -> int:
        """Intra-op threads: in proportion to the share of a CPU device; on a GPU, the cores the job asked for."""
        device = self._devices[slot.device]
        return max(1, self._options.cpus if device.cuda is not None else round(slot.fraction * len(device.cores)))


@dataclass(frozen=True, slots=True)
class MemoryShortage:
    """A step that ran out of memory on a device while the other jobs there were paused."""

    failure: WorkerFailed
    device: LocalDevice
    batch_size: int

    @property
    def description(self) -> str:
        size = f" ({self.device.memory_bytes / 2**30:.1f} GiB)" if self.device.memory_bytes else ""
        step = f"step {self.failure.step + 1} of {self.batch_size} samples"
        limit = self.failure.limit or f"{self.device.name} has{size}"
        return f"{step} needs more memory than {limit}: {self.failure.error}."

    @property
    def leak(self) -> str:
        """The error if memory grew over the steps before: the step that failed needs no more than those did."""
        limit = f" There is no more than {self.failure.limit}." if self.failure.limit else ""
        error = f" The error: {self.failure.error}."
        return f"ran out of memory at step {self.failure.step + 1}. {self.failure.growth}{limit}{error}"


class MicroBatching:
    """Limits on the samples of a pass, halved each time a step runs out of memory.

    The gradient is a mean over samples, so weighted passes over fewer samples add up to the same gradient, up to
    rounding. Steps before the first limit stay whole when they are repeated.
    """

    def __init__(self, known: Sequence[MicroBatchLimit] = ()) -> None:
        self._known = list(known)

    @property
    def limits(self) -> MicroBatchLimits:
        return tuple((limit.step, limit.samples) for limit in self._known)

    def halve(self, step: int, samples: int) -> MicroBatchLimit | None:
        """From this step on, halve passes of this many samples; None if a pass is already one sample."""
        now = min(max_micro_batch(self.limits, step) or samples, samples)
        if now < 2:
            return None
        limit = MicroBatchLimit(step, -(-now // 2))
        self._known.append(limit)
        return limit


def why_not_split(shortage: MemoryShortage, options: JobOptions, ready: Ready | None) -> str:
    """Why a job must fail instead of using micro-batches, and the way out; empty: it may use them."""
    lower = f"lower batch_size ({shortage.batch_size})"
    if shortage.failure.growth:
        return shortage.leak
    if not shortage.failure.samples:
        why = "It was not a training pass: evaluate in smaller batches, or choose a smaller model."
    elif options.exact:
        why = f"Micro-batches would change the bits of an exact job: {lower}, or set exact = false."
    elif ready is not None and ready.has_batch_norm:
        why = f"Micro-batches would change the statistics of BatchNorm: {lower}."
    elif not options.micro_batching:
        why = f"Micro-batches are turned off: {lower}."
    else:
        return ""
    return f"{shortage.description} {why}"
