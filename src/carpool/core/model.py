"""Job model: what is requested (JobSpec), what is held (Share, Allocation) and a job's state (Job)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import NamedTuple, NewType

from carpool.core.errors import Overbooked
from carpool.core.host_resources import HostResources
from carpool.core.typed_fields import Signed

JobId = NewType("JobId", str)
DeviceId = NewType("DeviceId", int)
NodeId = NewType("NodeId", int)
Kind = NewType("Kind", str)
Param = str | int | float | bool  # the value of a hyper-parameter

WHOLE = 100  # percent of a GPU
_LANE_TYPE = re.compile(r"(.+)@(\d{1,3})")


def lane_type(model: str, percent: int) -> Kind:
    """The device type of a lane with this percentage of a GPU: ``H200@50``."""
    return Kind(f"{model}@{percent}")


def lane_of(kind: Kind) -> tuple[Kind, float]:
    """The device type of a lane's GPU, and its portion of the GPU; for a whole device its own type, and 1."""
    match = _LANE_TYPE.fullmatch(kind)
    if match is None or not 1 <= int(match[2]) <= WHOLE:
        return kind, 1.0
    return Kind(match[1]), int(match[2]) / WHOLE


class Phase(StrEnum):
    """The state of a job between submission and its end."""

    BLOCKED = "blocked"  # waits for the jobs in `after`, or for the limit of its array
    WAITING = "waiting"  # in the queue, holds nothing
    RUNNING = "running"  # holds devices, perhaps still starting
    PAUSED = "paused"  # by its user, or at a rung of its sweep
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_over(self) -> bool:
        return self in _OVER


_OVER = frozenset({Phase.FINISHED, Phase.FAILED, Phase.CANCELLED})


class HalvingRule(NamedTuple):
    """Successive halving of a sweep: which part of its trials continues past each rung.

    Rungs are at `min_steps`, `min_steps` · eta, `min_steps` · eta² … steps; of the trials that reach a rung, the best
    1/eta by the metric continue.
    """

    metric: str
    is_max: bool  # larger is better
    eta: int
    min_steps: int


@dataclass(frozen=True, slots=True)
class JobSpec:
    """A job request. Changes after submission make a new spec.

    ``work`` is counted in units of the job's own choosing (seconds alone on ``devices`` reference devices, steps,
    samples); rates are in the same units per second. ``None``: length unknown.
    """

    id: JobId
    devices: int = 1  # gang size requested
    work: float | None = None
    model: str = ""  # name by which estimators and worlds know it
    batch_size: int = 0  # 0: the training's own
    weight: float = 1.0  # importance in weighted completion time
    user: str = ""
    min_devices: int = 0  # 0: as `devices` (not elastic downwards)
    max_devices: int = 0  # 0: as `devices` (not elastic upwards)
    batch_range: tuple[int, int] | None = None  # batch sizes that tuning may use
    memory_bytes: int = 0  # resident memory on each device; 0: unknown
    kinds: tuple[Kind, ...] = ()  # device types it may run on; empty: any
    exact: bool = False  # share and logical shards are fixed for life
    after: tuple[JobId, ...] = ()
    retries: int = 2  # further attempts after crashes without progress in between
    cpus: int = 0  # cores per device; 0: no request
    ram_bytes: int = 0  # per device
    disk_bytes: int = 0  # per node
    max_nodes: int = 0  # most that it may run on at once, if the cluster limits that; 0: the cluster's limit
    priority: Signed = 0  # higher starts first; already included in the weight
    array: str = ""  # name shared by all jobs of one sweep
    at_most: int = 0  # jobs of its array that may wait or run at once; 0: all
    deadline_s: float = 0.0  # seconds after submission by which it should finish; 0: none
    resumable: bool = True  # False: losing its devices loses its work, so no plan preempts it
    params: tuple[tuple[str, Param], ...] = ()  # hyper-parameters that its sweep varies, for display
    halving: HalvingRule | None = None  # of its array

    @property
    def narrowest(self) -> int:
        return self.min_devices or self.devices

    @property
    def widest(self) -> int:
        return self.max_devices or self.devices

    @property
    def needs_host_resources(self) -> bool:
        return bool(self.cpus or self.ram_bytes or self.disk_bytes)

    @property
    def is_ranked(self) -> bool:
        return bool(self.priority or self.deadline_s)

    def resources_for(self, num_devices: int) -> HostResources:
        """Host resources it requests of a node on which it holds that many devices."""
        return HostResources(self.cpus * num_devices, self.ram_bytes * num_devices, self.disk_bytes)


class Share(NamedTuple):
    """A fraction of each device in a run of consecutive devices.

    Fractions on one device may sum past 1.0 where the policy allows it. ``turn`` orders jobs that alternate on a
    device: the lower runs first, the higher while it is idle.
    """

    devices: range
    fraction: float = 1.0
    turn: int = 0


class Allocation(NamedTuple):
    """What one job holds: shares of devices, and how its batch is split over them."""

    shares: tuple[Share, ...]
    batch_size: int = 0  # 0: the spec's own
    parts: tuple[int, ...] = ()  # samples (default mode) or shards (exact mode) per device; empty: equal parts

    @classmethod
    def exclusive(cls, runs: tuple[range, ...], batch_size: int = 0) -> Allocation:
        if len(runs) == 1:
            return cls((Share(runs[0]),), batch_size)
        return cls(tuple([Share(run) for run in runs]), batch_size)

    @classmethod
    def of(cls, *devices: int, fraction: float = 1.0, turn: int = 0, batch_size: int = 0) -> Allocation:
        """One fraction of each of the named devices, consecutive ones joined into runs."""
        return cls(tuple(Share(run, fraction, turn) for run in as_runs(devices)), batch_size)

    @property
    def num_devices(self) -> int:
        shares = self.shares
        if len(shares) == 1:
            return len(shares[0].devices)
        return sum([len(share.devices) for share in shares])

    @property
    def fractions(self) -> tuple[float, ...]:
        """The distinct fractions in it, ascending; usually one."""
        shares = self.shares
        return (shares[0].fraction,) if len(shares) == 1 else tuple(sorted({share.fraction for share in shares}))

    @property
    def is_whole(self) -> bool:
        """Whether it holds the whole of each of its devices."""
        shares = self.shares
        return shares[0].fraction == 1.0 and (len(shares) == 1 or self.fractions == (1.0,))

    @property
    def num_held(self) -> float:
        """Devices held, each counted by its fraction."""
        shares = self.shares
        if len(shares) == 1:
            return len(shares[0].devices) * shares[0].fraction
        return sum([len(share.devices) * share.fraction for share in shares])

    def same_devices(self, other: Allocation) -> bool:
        if len(self.shares) == len(other.shares) == 1:
            return self.shares[0].devices == other.shares[0].devices
        return set(self.devices()) == set(other.devices())

    def devices(self) -> Iterator[DeviceId]:
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

    ``done`` and ``service`` are exact at ``as_of``; `done_at` and `service_at` extrapolate.
    A tuple, because one is created at every step of every job and a frozen dataclass costs five times as much.
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
    rate: float = 0.0  # estimated or measured units per second from `as_of` on
    as_of: float = 0.0
    service: tuple[tuple[Kind, float], ...] = ()  # device-seconds received per kind up to `as_of`
    crashes: int = 0  # since the last progress
    since: float = 0.0  # when the present phase began
    past: Past | None = None
    believed: float = 0.0  # rate expected once the desired allocation applies
    lane: tuple[float, ...] = ()  # fractions an exact job was first assigned; fixed for life
    probe_steps: int = 0  # of the newest order, if it is a probe

    @property
    def id(self) -> JobId:
        return self.spec.id

    @property
    def deadline_at(self) -> float:
        """When it should have finished; infinite without a deadline."""
        return self.submitted_at + self.spec.deadline_s if self.spec.deadline_s else inf

    @property
    def is_starting(self) -> bool:
        """Whether its newest allocation has been ordered but not yet applied."""
        return self.desired is not None and self.applied < self.generation

    def check_lane(self, allocation: Allocation) -> None:
        """Raise Overbooked if an exact job's share would change: libraries would pick other kernels."""
        if self.lane and allocation.fractions != self.lane:
            raise Overbooked(
                f"job {self.id!r} is exact: its share must stay {_text(self.lane)}, not {_text(allocation.fractions)}. "
                "Move it with the same share, or submit it without exact."
            )

    def done_at(self, at: float) -> float:
        """Units of work done by `at`, extrapolated; at most the spec's work."""
        done = self.done + self.rate * (at - self.as_of)
        work = self.spec.work
        return done if work is None or done < work else work

    def remaining_at(self, at: float) -> float:
        """Units of work left at `at`; infinite when the length is unknown."""
        work = self.spec.work
        if work is None:
            return float("inf")
        return max(0.0, work - self.done - self.rate * (at - self.as_of))


def _text(fractions: tuple[float, ...]) -> str:
    return " and ".join(f"{fraction:g}" for fraction in fractions)


class Past(NamedTuple):
    """One entry of a job's history, linked to the entry before it."""

    at: float
    words: str
    before: Past | None = None

    def lines(self) -> tuple[str, ...]:
        """The history as text, oldest first."""
        lines: list[str] = []
        link: Past | None = self
        while link is not None:
            lines.append(f"{link.at:.3f} s {link.words}")
            link = link.before
        return tuple(reversed(lines))
