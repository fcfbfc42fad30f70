"""Views: plain values that API and dashboard return. Field names are JSON keys; times are Unix time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from carpool.core.model import JobId, Param, Phase


@dataclass(frozen=True, slots=True)
class DeviceShareView:
    """A job's share of one device."""

    device: int
    name: str  # of the device
    fraction: float
    turn: int = 0


@dataclass(frozen=True, slots=True)
class TimeEstimate:
    """Expected seconds until an event, with one standard deviation."""

    mean_s: float
    std_s: float


@dataclass(frozen=True, slots=True)
class JobView:
    """A job: its request, state, progress and outcome."""

    id: JobId
    user: str
    phase: Phase
    what: str  # the entry, or the command line
    weight: float  # without the factors of priority and quota
    devices: int  # requested
    min_devices: int
    max_devices: int
    exact: bool
    after: tuple[JobId, ...]
    submitted_at: float
    started_at: float | None  # of its first allocation
    ended_at: float | None
    waited_s: float  # time without a device so far
    holds: tuple[DeviceShareView, ...]
    batch_size: int  # 0: as the training sets it
    steps: float
    total_steps: float | None
    steps_per_s: float
    loss: float | None
    metrics: Mapping[str, float]
    ends_in: TimeEstimate | None  # None: unknown, or ended
    reason: str  # of its latest decision
    error: str
    exit_code: int | None  # after its end: that of its command, else 0 for finished and 1 otherwise
    digest: str | None
    cpus: int = 0  # requested per device; 0: no request
    ram_bytes: int = 0  # requested per device
    disk_bytes: int = 0  # requested per node
    priority: str = "normal"
    array: str = ""  # the sweep it belongs to
    at_most: int = 0  # jobs of its array that may wait or run at once; 0: all
    deadline: float | None = None
    is_late: bool = False  # missed its deadline
    params: Mapping[str, Param] = field(default_factory=dict)  # hyper-parameters that its sweep varies
    restarts: int = 0  # after crashes and lost nodes
    warning: str = ""  # of its executor, such as that it uses more memory than it declared

    @property
    def progress(self) -> float | None:
        """The fraction completed, from 0 to 1; None when its length is unknown."""
        if self.phase is Phase.FINISHED:
            return 1.0
        return None if not self.total_steps else min(1.0, self.steps / self.total_steps)


@dataclass(frozen=True, slots=True)
class PointView:
    """A value of a metric after a step."""

    step: int
    value: float


@dataclass(frozen=True, slots=True)
class ResultRow:
    """One job of a sweep or run: its hyper-parameters and results."""

    job: JobId
    params: Mapping[str, Param]
    state: Phase
    note: str  # why it failed or was stopped
    steps: int
    time_s: float  # with devices
    last: PointView | None  # of the chosen metric; None: not reported, or not finite
    best: PointView | None
    metrics: Mapping[str, float]  # the last value of each


@dataclass(frozen=True, slots=True)
class ResultsView:
    """The results of a sweep or run, best first."""

    name: str
    metric: str  # by which they are ordered
    mode: str  # max or min
    metrics: tuple[str, ...]  # that its jobs report
    params: tuple[str, ...]
    best: JobId | None
    rows: tuple[ResultRow, ...]


@dataclass(frozen=True, slots=True)
class SweepView:
    """A sweep and how many of its jobs are over."""

    name: str
    user: str
    jobs: int
    over: int
    submitted_at: float


@dataclass(frozen=True, slots=True)
class JobPage:
    """One page of the matching jobs, and their total number."""

    jobs: tuple[JobView, ...]
    total: int
    offset: int


@dataclass(frozen=True, slots=True)
class ResidentView:
    """A job on a device; the name is empty when the caller may not see the job."""

    job: str
    fraction: float
    turn: int
    memory_bytes: int = 0  # requested there; 0: unknown


@dataclass(frozen=True, slots=True)
class ForeignProcessView:
    """A process on a device that does not belong to the daemon."""

    device: str  # its name
    pid: int
    user: str  # its Unix user; empty: unknown
    program: str
    memory_bytes: int  # 0: unknown
    keeps_free: bool  # whether the scheduler avoids the device because of it while no job holds it


@dataclass(frozen=True, slots=True)
class DeviceView:
    """A device and the jobs on it."""

    id: int
    name: str
    node: str
    kind: str
    memory_bytes: int
    is_lost: bool
    residents: tuple[ResidentView, ...]
    outsiders: tuple[ForeignProcessView, ...] = ()

    @property
    def held(self) -> float:
        """The allocated fraction, at most 1."""
        return min(1.0, sum(resident.fraction for resident in self.residents))


@dataclass(frozen=True, slots=True)
class ResourceView:
    """CPU cores, RAM and disk of a machine; 0: unknown, or none."""

    cpus: int
    ram_bytes: int
    disk_bytes: int


@dataclass(frozen=True, slots=True)
class NodeView:
    """A machine with its devices."""

    name: str
    is_lost: bool
    is_drained: bool  # an operator took it out of service
    devices: int
    kinds: Mapping[str, int]  # number of devices by type
    held: float  # allocated devices: the sum of allocated fractions, at most 1 per device
    supplies: ResourceView
    taken: ResourceView  # the part of `supplies` that jobs requested
    outsiders: tuple[ForeignProcessView, ...] = ()  # on all of its devices


@dataclass(frozen=True, slots=True)
class ChangeView:
    """One change of a plan: the new allocation of a job; empty when the job is preempted."""

    job: str
    holds: tuple[DeviceShareView, ...]
    batch_size: int
    believed: float  # expected units of work per second; 0: unknown


@dataclass(frozen=True, slots=True)
class DecisionView:
    """A plan that changed at least one allocation."""

    number: int  # increases with every decision
    at: float
    reason: str
    changes: tuple[ChangeView, ...]


@dataclass(frozen=True, slots=True)
class SpanView:
    """A job held a share of a device; `until` is None while it still does."""

    device: int
    job: str
    fraction: float
    since: float
    until: float | None


@dataclass(frozen=True, slots=True)
class StoryEventView:
    """One event of a job's history, as text."""

    at: float
    words: str


@dataclass(frozen=True, slots=True)
class MeasurementView:
    """One report of a training: loss, rate, or evaluation metrics."""

    at: float
    step: float
    loss: float | None = None
    steps_per_s: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LogChunk:
    """A part of a job's log."""

    text: str
    start: int  # in bytes
    next: int  # where the next part begins
    is_over: bool  # whether this is the end of the log


@dataclass(frozen=True, slots=True)
class SummaryView:
    """Overview of the daemon."""

    at: float
    version: str
    policy: str
    jobs: Mapping[Phase, int]  # jobs the caller may see, by phase
    devices: int
    lost_devices: int
    held: float  # allocated devices: the sum of allocated fractions, at most 1 per device
    policy_fault: str = ""  # why this fallback replaced the previous policy; empty: it did not


@dataclass(frozen=True, slots=True)
class ServiceCounters:
    """Counters of the daemon."""

    decisions: int
    events: int
    listeners: int
    steps_per_s: float  # of all running jobs
