"""Views: plain values that API and dashboard return; times are Unix time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from carpool.core.model import JobId, Phase


@dataclass(frozen=True, slots=True)
class DeviceShareView:
    """What a job holds of one device."""

    device: int
    name: str  # of the device
    fraction: float
    turn: int = 0


@dataclass(frozen=True, slots=True)
class TimeEstimate:
    """Seconds until something, and how far off that may be (one standard deviation)."""

    mean_s: float
    std_s: float


@dataclass(frozen=True, slots=True)
class JobView:
    """A job as people see it."""

    id: JobId
    user: str
    phase: Phase
    what: str  # its entry, or its command in one line
    weight: float
    devices: int  # asked for
    min_devices: int
    max_devices: int
    exact: bool
    after: tuple[JobId, ...]
    submitted_at: float
    started_at: float | None  # when it was first given a device
    ended_at: float | None
    waited_s: float  # time without a device, until now or its end
    holds: tuple[DeviceShareView, ...]
    batch_size: int  # 0: the training's own
    steps: float
    total_steps: float | None
    steps_per_s: float
    loss: float | None
    metrics: Mapping[str, float]
    ends_in: TimeEstimate | None  # None: nobody knows, or it is over
    reason: str  # of the newest decision about it
    error: str
    exit_code: int | None  # of a job that is over: its command's own, else 0 where it finished and 1 where it did not
    digest: str | None
    cpus: int = 0  # asked for, for each device; 0: whatever there is
    ram_bytes: int = 0  # likewise
    disk_bytes: int = 0  # on each node
    priority: str = "normal"
    array: str = ""  # the sweep that it is one of
    at_most: int = 0  # of its array that may wait or run at once
    deadline: float | None = None  # by when it should have finished
    is_late: bool = False  # it had not by then

    @property
    def progress(self) -> float | None:
        """How much of it is done, from 0 to 1, where its length is known."""
        if self.phase is Phase.FINISHED:
            return 1.0
        return None if not self.total_steps else min(1.0, self.steps / self.total_steps)


@dataclass(frozen=True, slots=True)
class JobPage:
    """Some of the jobs that match, and how many do."""

    jobs: tuple[JobView, ...]
    total: int
    offset: int


@dataclass(frozen=True, slots=True)
class ResidentView:
    """A job on a device, as seen from the device; the name is empty where it is somebody else's business."""

    job: str
    fraction: float
    turn: int
    memory_bytes: int = 0  # that it says it needs there; 0: nobody knows


@dataclass(frozen=True, slots=True)
class ForeignProcessView:
    """A process that computes on a device and is no job of the daemon's."""

    device: str  # its name
    pid: int
    user: str  # of the machine; empty: not told
    program: str
    memory_bytes: int  # 0: not told
    keeps_free: bool  # whether the device is left to it while no job is there


@dataclass(frozen=True, slots=True)
class DeviceView:
    """A device and who holds it."""

    id: int
    name: str
    node: str
    kind: str
    memory_bytes: int
    is_lost: bool
    residents: tuple[ResidentView, ...]
    outsiders: tuple[ForeignProcessView, ...] = ()


@dataclass(frozen=True, slots=True)
class ResourceView:
    """Something of what a machine has besides its devices; 0: unknown, or none."""

    cpus: int
    ram_bytes: int
    disk_bytes: int


@dataclass(frozen=True, slots=True)
class NodeView:
    """A machine with its devices."""

    name: str
    is_lost: bool
    devices: int
    kinds: Mapping[str, int]  # devices of each
    held: float  # devices held, each by the fractions given away, at most 1
    supplies: ResourceView
    taken: ResourceView  # of its supplies, by jobs that asked for some
    outsiders: tuple[ForeignProcessView, ...] = ()  # on all of its devices


@dataclass(frozen=True, slots=True)
class ChangeView:
    """One line of a plan: what a job gets; nothing where it is taken off."""

    job: str
    holds: tuple[DeviceShareView, ...]
    batch_size: int
    believed: float  # units of work per second expected; 0: not known yet


@dataclass(frozen=True, slots=True)
class DecisionView:
    """A plan that changed something."""

    number: int  # grows from decision to decision
    at: float
    reason: str
    changes: tuple[ChangeView, ...]


@dataclass(frozen=True, slots=True)
class SpanView:
    """A job held a share of a device for a while; `until` is None while it still does."""

    device: int
    job: str
    fraction: float
    since: float
    until: float | None


@dataclass(frozen=True, slots=True)
class StoryEventView:
    """Something in a job's story, in words."""

    at: float
    words: str


@dataclass(frozen=True, slots=True)
class MeasurementView:
    """One report of a training: its loss and rate, or what it measured of itself."""

    at: float
    step: float
    loss: float | None = None
    steps_per_s: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LogChunk:
    """A stretch of a job's log."""

    text: str
    start: int  # in bytes
    next: int  # where the next stretch begins
    is_over: bool  # whether nothing will follow


@dataclass(frozen=True, slots=True)
class SummaryView:
    """The whole daemon in a few figures."""

    at: float
    version: str
    policy: str
    jobs: Mapping[Phase, int]  # of those that may be seen
    devices: int
    lost_devices: int
    held: float  # devices held, each by the fractions given away, at most 1
    policy_fault: str = ""  # of the policy before, where that is why this one decides


@dataclass(frozen=True, slots=True)
class ServiceCounters:
    """What a daemon has done so far, counted."""

    decisions: int
    events: int
    listeners: int
    steps_per_s: float  # of all running jobs together
