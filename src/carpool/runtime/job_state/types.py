"""Value types of a job's state: worker slots, targets, process group epochs, state copies, options."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from carpool.core.messages import Assign, Order, Probe
from carpool.core.model import WHOLE
from carpool.runtime.job_state.actions import Mirror
from carpool.runtime.job_state.proportional_split import as_owners
from carpool.runtime.job_state.update_sharding import Ranges, UpdateSharding
from carpool.runtime.process.protocol import Ready

_NEWEST = 0.2  # weight of the newest step in the averages of an epoch
SlotKey = tuple[int, int]  # device and lane: what a worker's process is bound to


class WorkerMode(StrEnum):
    """What a worker is doing."""

    STARTING = "starting"  # loads the entry
    IDLE = "idle"  # at a step boundary
    LOADING = "loading"  # loads a state
    RUNNING = "running"  # makes steps in the current epoch
    HALTING = "halting"  # makes steps, and was ordered to stop at the next boundary
    DONE = "done"  # its training has ended
    EXITING = "exiting"  # was dismissed or killed; its exit has not been seen yet


AT_BOUNDARY = frozenset({WorkerMode.IDLE, WorkerMode.DONE})
STEPPING = frozenset({WorkerMode.RUNNING, WorkerMode.HALTING})


@dataclass(slots=True)
class WorkerState:
    """One worker of a job."""

    id: int
    device: int
    lane: int = WHOLE  # percent of the device its process was started with
    mode: WorkerMode = WorkerMode.STARTING
    has_state: bool = False  # trained or loaded, not just the entry's initial weights
    has_joined: bool = False  # was a member of an epoch
    step: int = 0  # steps done; exact at a boundary
    digest: str = ""  # of the final weights
    loading_path: str = ""  # the checkpoint it is reading
    is_warming_up: bool = False  # makes warm-up steps while loading, so it may be using the device
    is_writer: bool = False  # was started only to write a mirrored state to disk
    exiting_since: float = 0.0
    standby_until: float = 0.0  # kept on a lane that may be assigned again soon; 0: not on standby

    @property
    def key(self) -> SlotKey:
        return self.device, self.lane

    def can_continue_from(self, step: int) -> bool:
        return self.step == step and (self.has_state or step == 0)


@dataclass(frozen=True, slots=True)
class WorkerSlot:
    """A device share for one worker."""

    device: int
    fraction: float = 1.0
    turn: int = 0


@dataclass(frozen=True, slots=True)
class Target:
    """The newest order as a target."""

    generation: int
    slots: tuple[WorkerSlot, ...] = ()  # none: release all devices
    batch_size: int = 0  # 0: the training's own
    parts: tuple[int, ...] = ()  # samples or shards per slot; empty: by speed
    probe: int = 0  # steps to measure, after as many warm-up steps; 0: none


@dataclass(frozen=True, slots=True)
class StepLayout:
    """How an epoch divides a step; a different layout needs a new epoch."""

    slots: tuple[WorkerSlot, ...]
    counts: tuple[int, ...]  # samples (default mode) or shards (exact mode) per rank; empty: a single rank
    batch_size: int
    time_sliced: bool
    update_ranges: Ranges = ()  # parameters each rank updates; empty: all update all

    @property
    def devices(self) -> tuple[int, ...]:
        return tuple(slot.device for slot in self.slots)


@dataclass(slots=True)
class StepTiming:
    """Moving averages of an epoch's step time, and of the part of it outside the longest pass."""

    step_s: float | None = None
    sync_s: float | None = None
    passes_s: dict[int, float] = field(default_factory=dict)  # by worker
    _last: float | None = None

    def on_barrier(self, at: float, passes_s: Mapping[int, float], steps: int = 1) -> float | None:
        """Record that all workers contributed. Returns the part of a step's time outside the longest pass."""
        last, self._last = self._last, at
        if last is None:
            return None
        step_s = (at - last) / steps
        sync_s = max(0.0, step_s - max(passes_s.values()))
        self.step_s = _moved(self.step_s, step_s)
        self.sync_s = _moved(self.sync_s, sync_s)
        self.passes_s = {worker: _moved(self.passes_s.get(worker), pass_s) for worker, pass_s in passes_s.items()}
        return sync_s

    def busy(self, workers: Iterable[int]) -> tuple[float, ...]:
        """The portion of a step that each worker computes; empty until that is known."""
        if not self.step_s or not self.passes_s:
            return ()
        return tuple(min(1.0, self.passes_s.get(worker, 0.0) / self.step_s) for worker in workers)


def _moved(mean: float | None, value: float) -> float:
    return value if mean is None else mean + _NEWEST * (value - mean)


@dataclass(slots=True)
class ProcessGroupEpoch:
    """Workers that make steps together, from one change of the group to the next."""

    number: int
    members: tuple[int, ...]  # workers by rank
    layout: StepLayout
    step: int  # steps known to be done
    since: float
    halting: bool = False
    granted: int = 0  # the first step that may not be applied yet
    last_grant: int = 1  # steps that the last `Apply` covers
    contributed: dict[int, float] = field(default_factory=dict)  # seconds of each worker's pass in the current step
    updated: set[int] = field(default_factory=set)  # workers that have updated their range in the last step
    timing: StepTiming = field(default_factory=StepTiming)

    @property
    def is_solo(self) -> bool:
        return len(self.members) == 1


@dataclass(frozen=True, slots=True)
class StateCopy:
    """A state outside the workers: a mirror in memory, or a checkpoint on disk."""

    step: int
    mirror: Mirror | None = None
    path: str = ""
    is_mirror_file: bool = False  # a copy of a mirror on disk, not a checkpoint that the user asked for


@dataclass(frozen=True, slots=True)
class JobOptions:
    """Options of a job's state machine, from its program and from the executor."""

    exact: bool = False
    shards: int = 8
    retries: int = 2
    batch_size: int = 0  # 0: the training's own
    batch_per_device: bool = False
    checkpoint_s: float = 60.0
    time_limit_s: float = 0.0  # 0: none
    mirror_s: float = 2.0
    copies_mirrors: bool = False  # to disk, for other machines to fetch
    grace_s: float = 5.0  # between `Leave` and a kill
    update_sharding: UpdateSharding = UpdateSharding.CHOSEN
    micro_batching: bool = True  # split steps that do not fit into memory
    sync_batchnorm: bool = False  # ranks exchange their statistics within a pass
    reducer: str = "shared"  # or "group"
    has_lanes: bool = False  # a share of a GPU is an MPS percentage, fixed for a process's life
    cpus: int = 0  # cores of each worker on a GPU; 0: torch's default number of threads
    ahead_s: float = 0.1  # how many seconds of steps one grant covers across nodes; a change waits that long


def owners_of(layout: StepLayout, *, exact: bool) -> tuple[tuple[int, int], ...]:
    """Pieces of each rank: its shards in exact mode, one part in default mode."""
    if not layout.counts:
        return ()
    return as_owners(layout.counts if exact else (1,) * len(layout.slots))


def entry_mismatch(first: Ready, other: Ready) -> str:
    """The error when two workers of a job loaded different initial weights; empty if they are equal."""
    if first.fingerprint == other.fingerprint:
        return ""
    return (
        "the entry is not deterministic: two workers loaded different initial weights "
        f"({first.fingerprint[:12]} and {other.fingerprint[:12]}). Draw all random numbers from torch, NumPy or random "
        "after import, and none from the time, the process id or the order of a set."
    )


def target_of(order: Order) -> Target:
    """An order as the target of a job's state machine."""
    if not isinstance(order, Assign):
        return Target(order.generation)
    allocation = order.allocation
    slots = [WorkerSlot(device, share.fraction, share.turn) for share in allocation.shares for device in share.devices]
    probe = order.purpose.steps if isinstance(order.purpose, Probe) else 0
    return Target(order.generation, tuple(slots), allocation.batch_size, allocation.parts, probe)


def local_first(target: Target, is_remote: Callable[[int], bool]) -> Target:
    """The same target with the slots of other nodes last: rank 0 is on the node that holds the job's state."""
    order = sorted(range(len(target.slots)), key=lambda place: is_remote(target.slots[place].device))
    parts = tuple(target.parts[place] for place in order) if len(target.parts) == len(order) else target.parts
    return replace(target, slots=tuple(target.slots[place] for place in order), parts=parts)
