"""A profile: what was measured of one training, and the models fitted to it. Scheduler and simulator read the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from carpool.predictors.memory import MemoryModel
from carpool.predictors.step_time import StepTime


@dataclass(frozen=True, slots=True)
class Measurement:
    """A few steps in one setting; what could not be measured there is None."""

    kind: str  # of the devices
    devices: int
    batch_size: int  # of the whole step
    share: float = 1.0
    exact: bool = False
    beside: str = ""  # entry of the training that ran on the same device; empty: it was alone
    steps: int = 0
    step_s: float | None = None
    step_spread_s: float | None = None  # standard deviation from step to step
    peak_bytes: int | None = None  # in use on one device, at the highest point of a step
    held_bytes: int | None = None  # the same with what the allocator keeps beside it
    device_use: float | None = None  # portion of the device's time
    bandwidth_use: float | None = None  # portion of the time in which its memory was busy
    batch_bytes: int | None = None  # of one batch, as the loss sees it
    host_to_device_bytes: float | None = None  # in one step
    out_of_memory: bool = False  # it does not fit: a limit, not a failure
    error: str = ""  # why there are no figures

    @property
    def samples_per_s(self) -> float | None:
        """The rate by samples."""
        return None if self.step_s is None else self.batch_size / self.step_s


@dataclass(frozen=True, slots=True)
class NoiseSeen:
    """The gradient noise scale φ at the beginning of a training, in samples."""

    scale: float | None  # None: the noise drowned the gradient
    spread: float | None
    parts: int  # of each batch, that were compared
    steps: int


class Costs(NamedTuple):
    """Seconds in which a job makes no steps; None where that is not known."""

    start_s: float | None = None  # from the order that gives it devices to its first step at full pace
    resize_s: float | None = None  # from the order that gives it other devices
    end_s: float | None = None  # from its last step to its end: evaluation, checkpoint

    def over(self, others: Costs) -> Costs:
        """These, and others where these are not known."""
        return Costs(*[other if mine is None else mine for mine, other in zip(self, others, strict=True)])


@dataclass(frozen=True, slots=True)
class Profile:
    """Everything that is known of one entry with its arguments."""

    entry: str
    args: Mapping[str, Any]
    source: str  # digest of the entry's file when it was measured; empty: unknown
    batch_size: int  # the training's own
    num_samples: int
    stop_steps: int | None = None  # when it ends at the latest, whatever the batch
    stop_epochs: int | None = None
    measurements: tuple[Measurement, ...] = ()
    noise: NoiseSeen | None = None
    start_s: float | None = None  # this and the next two: see `Costs`
    resize_s: float | None = None
    end_s: float | None = None
    version: str = ""  # of carpool
    machine: str = ""

    @property
    def key(self) -> str:
        """The same for the same entry with the same arguments."""
        return profile_key(self.entry, self.args)

    @property
    def costs(self) -> Costs:
        """What its starts, moves and ends take."""
        return Costs(self.start_s, self.resize_s, self.end_s)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds that were measured, in order of first appearance."""
        return tuple(dict.fromkeys(each.kind for each in self.measurements))

    def total_steps(self, batch_size: int = 0) -> int | None:
        """Steps after which it ends at the latest; None: only a target ends it."""
        per_epoch = -(-self.num_samples // (batch_size or self.batch_size))
        limits = [] if self.stop_steps is None else [self.stop_steps]
        if self.stop_epochs is not None:
            limits.append(self.stop_epochs * per_epoch)
        return min(limits, default=None)

    def points(self, kind: str, *, exact: bool = False) -> Iterator[Measurement]:
        """Measurements alone on one whole device of a kind, over batch sizes."""
        for each in self.measurements:
            is_plain = each.devices == 1 and each.share == 1.0 and not each.beside and each.exact == exact
            if is_plain and each.kind == kind:
                yield each

    def step_time(self, kind: str, *, exact: bool = False) -> StepTime | None:
        """T = a + b·m on one device of a kind, if it was measured."""
        found = self.points(kind, exact=exact)
        points = [(each.batch_size, each.step_s) for each in found if each.step_s is not None]
        return StepTime().fit(*zip(*points, strict=True)) if points else None

    def memory(self, kind: str) -> MemoryModel | None:
        """Bytes in use by batch size on one device of a kind, if they were measured."""
        points = {each.batch_size: each.peak_bytes for each in self.points(kind) if each.peak_bytes}
        return MemoryModel().fit(list(points), list(points.values())) if points else None

    def held(self, kind: str) -> MemoryModel | None:
        """The same with what the allocator keeps beside it: what a process has to be given, by its `bound`."""
        points = {each.batch_size: each.held_bytes for each in self.points(kind) if each.held_bytes}
        return MemoryModel().fit(list(points), list(points.values())) if points else None

    def memory_limit(self, kind: str) -> int | None:
        """The smallest batch that was seen not to fit on one device of a kind."""
        return min((each.batch_size for each in self.points(kind) if each.out_of_memory), default=None)

    def exact_price(self, kind: str) -> float | None:
        """Step time with exact = true over that without, at the same batch on one device."""
        exact = {each.batch_size: each.step_s for each in self.points(kind, exact=True)}
        for each in self.points(kind):
            with_exact = exact.get(each.batch_size)
            if each.step_s is not None and with_exact is not None:
                return with_exact / each.step_s
        return None


def short_entry(entry: str) -> str:
    """An entry without the folders before its file: the same training is called differently from different places."""
    source, colon, function = entry.rpartition(":")
    return f"{source.rpartition('/')[2]}{colon}{function}"


def profile_key(entry: str, args: Mapping[str, Any]) -> str:
    """A short digest of an entry with its arguments."""
    entry = short_entry(entry)
    return hashlib.sha256(json.dumps([entry, args], sort_keys=True).encode()).hexdigest()[:12]


def merged(old: Sequence[Measurement], new: Sequence[Measurement]) -> tuple[Measurement, ...]:
    """All measurements; where both know a setting, the new one."""
    known = {setting(each): each for each in (*old, *new)}
    return tuple(known.values())


def setting(each: Measurement) -> tuple[object, ...]:
    """What was set, without what was seen."""
    return each.kind, each.devices, each.batch_size, each.share, each.exact, each.beside
