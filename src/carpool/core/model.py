"""Job model: what is requested (JobSpec), what is held (Share, Allocation) and a job's state (Job)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import NamedTuple, NewType

from carpool.core.errors import Overbooked
from carpool.core.host_resources import HostResources

JobId = NewType("JobId", str)
DeviceId = NewType("DeviceId", int)
NodeId = NewType("NodeId", int)
Kind = NewType("Kind", str)


class Phase(StrEnum):
    """Where a job stands between submission and its end."""

    BLOCKED = "blocked"  # waits for the jobs named in `after`, or for room in its array
    WAITING = "waiting"  # may run, holds nothing
    RUNNING = "running"  # holds devices (perhaps still being set up)
    PAUSED = "paused"  # taken off by its user
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_over(self) -> bool:
        """Whether no further step is possible."""
        return self in _OVER


_OVER = frozenset({Phase.FINISHED, Phase.FAILED, Phase.CANCELLED})


@dataclass(frozen=True, slots=True)
class JobSpec:
    """What was asked: never changes after submission, except by a new spec.

    ``work`` is counted in units of the job's own choosing (seconds alone on ``devices`` reference devices, steps,
    samples); rates are in the same units per second. ``None`` means that nobody knows the length.
    """

    id: JobId
    devices: int = 1  # gang width asked for
    work: float | None = None
    model: str = ""  # what estimators and worlds know it by
    batch_size: int = 0  # 0: the training's own
    weight: float = 1.0  # importance in weighted completion time
    user: str = ""
    min_devices: int = 0  # 0: as asked (not elastic downwards)
    max_devices: int = 0  # 0: as asked (not elastic upwards)
    batch_range: tuple[int, int] | None = None  # batch sizes that tuning may use
    memory_bytes: int = 0  # resident memory on each device; 0: unknown
    kinds: tuple[Kind, ...] = ()  # device kinds it may run on; empty: any
    exact: bool = False  # share and logical shards are fixed for life
    after: tuple[JobId, ...] = ()
    retries: int = 2  # crashes without progress that are followed by another try
    cpus: int = 0  # cores for each device it holds; 0: whatever there is
    ram_bytes: int = 0  # for each device it holds
    disk_bytes: int = 0  # on each node it is on
    priority: int = 0  # higher ones start first; the weight has its part in it already
    array: str = ""  # the name of all jobs that were made by one sweep
    at_most: int = 0  # of its array that may wait or run at once, the others being blocked; 0: all
    deadline_s: float = 0.0  # seconds after its submission by which it should have finished; 0: none

    @property
    def narrowest(self) -> int:
        """Fewest devices it accepts."""
        return self.min_devices or self.devices

    @property
    def widest(self) -> int:
        """Most devices it accepts."""
        return self.max_devices or self.devices

    @property
    def asks_supplies(self) -> bool:
        """Whether it asks for more of a node than devices."""
        return bool(self.cpus or self.ram_bytes or self.disk_bytes)

    @property
    def is_ranked(self) -> bool:
        """Whether it may be served before or after others whatever the policy."""
        return bool(self.priority or self.deadline_s)

    def supplies_for(self, num_devices: int) -> HostResources:
        """What it asks for of a node on which it holds so many devices."""
        return HostResources(self.cpus * num_devices, self.ram_bytes * num_devices, self.disk_bytes)


class Share(NamedTuple):
    """A fraction of each device in a run of consecutive devices.

    Shares are virtual: fractions on one device may sum past 1.0 where the policy allows it. ``turn`` orders jobs that
    take turns on a device: the lower runs while the higher waits for the rest of its step.
    """

    devices: range
    fraction: float = 1.0
    turn: int = 0


class Allocation(NamedTuple):
    """What one job holds: shares of devices, and how its step is cut over them."""

    shares: tuple[Share, ...]
    batch_size: int = 0  # 0: the spec's own
    parts: tuple[int, ...] = ()  # samples (default mode) or shards (exact mode) per device; empty: equal parts

    @classmethod
    def exclusive(cls, runs: tuple[range, ...], batch_size: int = 0) -> Allocation:
        """Whole devices, alone."""
        if len(runs) == 1:
            return cls((Share(runs[0]),), batch_size)
        return cls(tuple([Share(run) for run in runs]), batch_size)

    @classmethod
    def of(cls, *devices: int, fraction: float = 1.0, turn: int = 0, batch_size: int = 0) -> Allocation:
        """One fraction of each of the named devices, consecutive ones joined into runs."""
        return cls(tuple(Share(run, fraction, turn) for run in as_runs(devices)), batch_size)

    @property
    def num_devices(self) -> int:
        """How many devices it touches."""
        shares = self.shares
        if len(shares) == 1:
            return len(shares[0].devices)
        return sum([len(share.devices) for share in shares])

    @property
    def fractions(self) -> tuple[float, ...]:
        """The unlike fractions in it, ascending: usually one."""
        shares = self.shares
        return (shares[0].fraction,) if len(shares) == 1 else tuple(sorted({share.fraction for share in shares}))

    @property
    def num_held(self) -> float:
        """Devices held, each counted by the fraction of it."""
        shares = self.shares
        if len(shares) == 1:
            return len(shares[0].devices) * shares[0].fraction
        return sum([len(share.devices) * share.fraction for share in shares])

    def same_devices(self, other: Allocation) -> bool:
        """Whether another allocation names the same devices, in whatever shares."""
        if len(self.shares) == len(other.shares) == 1:
            return self.shares[0].devices == other.shares[0].devices
        return set(self.devices()) == set(other.devices())

    def devices(self) -> Iterator[DeviceId]:
        """Every device, in the order of the shares."""
        for share in self.shares:
            for device in share.devices:
                yield DeviceId(device)


def as_runs(devices: tuple[int, ...]) -> tuple[range, ...]:
    """Join consecutive device ids into ranges, in ascending order."""
    runs: list[range] = []
    for device in sorted(devices):
        if runs and runs[-1].stop == device:
            runs[-1] = range(runs[-1].start, device + 1)
        else:
            runs.append(range(device, device + 1))
    return tuple(runs)


class Job(NamedTuple):
    """A submitted job: its spec, what it should hold (desired) and what it is known to hold (observed).

    ``done`` and ``service`` are exact at ``as_of`` and extrapolated from there; ask `done_at` and `service_at`.
    A tuple rather than a frozen dataclass because a new one is made at every step of every job: it costs a fifth.
    """

    spec: JobSpec
    seq: int  # order of submission; the last tie-break
    submitted_at: float
    phase: Phase
    desired: Allocation | None = None
    generation: int = 0  # of the newest order
    observed: Allocation | None = None
    applied: int = 0  # generation of the observed allocation
    done: float = 0.0  # units of work, at `as_of`
    rate: float = 0.0  # believed or measured units per second from `as_of` on
    as_of: float = 0.0
    service: tuple[tuple[Kind, float], ...] = ()  # device-seconds received per kind up to `as_of`
    crashes: int = 0  # since the last progress
    since: float = 0.0  # when the present phase began
    past: Past | None = None
    believed: float = 0.0  # rate expected once the desired allocation applies
    lane: tuple[float, ...] = ()  # fractions an exact job was first given: it keeps them for life
    probe_steps: int = 0  # that the newest order asks for, where it is a probe

    @property
    def id(self) -> JobId:
        """The spec's id."""
        return self.spec.id

    @property
    def deadline_at(self) -> float:
        """When it should have finished; never, where it has no deadline."""
        return self.submitted_at + self.spec.deadline_s if self.spec.deadline_s else inf

    @property
    def is_starting(self) -> bool:
        """Whether its newest allocation has been ordered but not yet seen applied."""
        return self.desired is not None and self.applied < self.generation

    def check_lane(self, allocation: Allocation) -> None:
        """Overbooked unless an exact job keeps its share for life: another makes libraries pick other kernels."""
        if self.lane and allocation.fractions != self.lane:
            raise Overbooked(
                f"job {self.id!r} is exact: its share stays {_text(self.lane)}, not {_text(allocation.fractions)}. "
                "Move it with the same share, or submit it without exact."
            )

    def done_at(self, at: float) -> float:
        """Units of work done by `at`, as far as is known; never beyond the spec's work."""
        done = self.done + self.rate * (at - self.as_of)
        work = self.spec.work
        return done if work is None or done < work else work

    def remaining_at(self, at: float) -> float:
        """Units of work left at `at`; infinite when nobody knows the length."""
        work = self.spec.work
        if work is None:
            return float("inf")
        return max(0.0, work - self.done - self.rate * (at - self.as_of))


def _text(fractions: tuple[float, ...]) -> str:
    return " and ".join(f"{fraction:g}" for fraction in fractions)


class Past(NamedTuple):
    """One link of a job's story: what happened when, and the link before it."""

    at: float
    words: str
    before: Past | None = None

    def tell(self) -> tuple[str, ...]:
        """The story so far, oldest first."""
        told: list[str] = []
        link: Past | None = self
        while link is not None:
            told.append(f"{link.at:.3f} s {link.words}")
            link = link.before
        return tuple(reversed(told))
