"""Value types of a job's state: worker slots, targets, process group epochs, state copies, options."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from carpool.core.messages import Assign, Order, Probe
from carpool.runtime.job_state.actions import Mirror
from carpool.runtime.job_state.proportional_split import as_owners
from carpool.runtime.job_state.update_sharding import Ranges, UpdateSharding
from carpool.runtime.process.protocol import Ready
from carpool.runtime.sharing.lanes import WHOLE

SlotKey = tuple[int, int]  # a device and a lane of it


class WorkerMode(StrEnum):
    """What a worker is doing."""

    WARMING = "warming"  # loads the entry
    STANDING = "standing"  # at a boundary, waiting
    LOADING = "loading"  # takes over a state
    WORKING = "working"  # in the formation
    HALTING = "halting"  # works, and was told to stop at the boundary
    OVER = "over"  # its training has ended
    LEAVING = "leaving"  # was sent away or killed; its end has not been seen yet


AT_REST = frozenset({WorkerMode.STANDING, WorkerMode.OVER})
AT_WORK = frozenset({WorkerMode.WORKING, WorkerMode.HALTING})


@dataclass(slots=True)
class WorkerState:
    """What a team knows of one worker."""

    id: int
    device: int
    lane: int = WHOLE  # percent of the device that its process was started with
    mode: WorkerMode = WorkerMode.WARMING
    holds: bool = False  # a state that has been trained or loaded, not just the entry's own
    has_joined: bool = False  # has been in a formation
    step: int = 0  # steps done, exact when at rest
    digest: str = ""  # of the final weights
    loads: str = ""  # the checkpoint it is reading
    rehearses: bool = False  # makes steps that are undone, so it has work on the device
    writes: bool = False  # is here only to write a mirrored state to disk
    left_at: float = 0.0  # when it was sent away
    reserve_until: float = 0.0  # stands by on a lane that may be wanted again soon; 0: it does not

    @property
    def berth(self) -> SlotKey:
        """Where it is, as far as that cannot be changed."""
        return self.device, self.lane

    def is_at(self, step: int) -> bool:
        """Whether it could make the step after so many; before the first one no state is needed."""
        return self.step == step and (self.holds or step == 0)


@dataclass(frozen=True, slots=True)
class WorkerSlot:
    """A place for one worker."""

    device: int
    fraction: float = 1.0
    turn: int = 0


@dataclass(frozen=True, slots=True)
class Target:
    """What the newest order asks for."""

    generation: int
    seats: tuple[WorkerSlot, ...] = ()  # none: hold nothing
    batch_size: int = 0  # 0: the training's own
    parts: tuple[int, ...] = ()  # samples or shards per seat; empty: by speed
    probe: int = 0  # steps to be measured, after as many that warm up; 0: nothing is asked


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Everything about a formation but who fills it: two of them differ when work must be arranged anew."""

    seats: tuple[WorkerSlot, ...]
    counts: tuple[int, ...]  # samples (default mode) or shards (exact mode) per rank; empty: alone
    batch_size: int
    by_token: bool
    updates: Ranges = ()  # parameters that each rank updates; empty: all do all

    @property
    def devices(self) -> tuple[int, ...]:
        """Devices by rank."""
        return tuple(seat.device for seat in self.seats)


@dataclass(slots=True)
class StepTiming:
    """How long a step takes in company, and how much of that is waiting and adding up."""

    step_s: float | None = None
    sync_s: float | None = None
    _last: float | None = None

    def barrier(self, at: float, slowest_s: float) -> float | None:
        """All contributions to a step are there; the slowest pass took so long. What the step took beside it."""
        last, self._last = self._last, at
        if last is None:
            return None
        step_s = at - last
        sync_s = max(0.0, step_s - slowest_s)
        self.step_s = step_s if self.step_s is None else self.step_s + 0.2 * (step_s - self.step_s)
        self.sync_s = sync_s if self.sync_s is None else self.sync_s + 0.2 * (sync_s - self.sync_s)
        return sync_s


@dataclass(slots=True)
class ProcessGroupEpoch:
    """Workers that make steps together."""

    number: int
    members: tuple[int, ...]  # by rank
    shape: StepLayout
    step: int  # steps done, as far as is known
    since: float
    halting: bool = False
    contributed: dict[int, float] = field(default_factory=dict)  # to the present step, with the seconds it took
    updated: set[int] = field(default_factory=set)  # have updated their parameters in the last step
    rhythm: StepTiming = field(default_factory=StepTiming)

    @property
    def is_solo(self) -> bool:
        """Whether its one member makes steps without asking."""
        return len(self.members) == 1


@dataclass(frozen=True, slots=True)
class StateCopy:
    """The newest state outside of workers: a mirror in memory, or a checkpoint on disk."""

    step: int
    mirror: Mirror | None = None
    path: str = ""


@dataclass(frozen=True, slots=True)
class JobOptions:
    """What a team has to know of its program and of the executor's options."""

    exact: bool = False
    shards: int = 8
    retries: int = 3
    batch_size: int = 0  # 0: the training's own
    batch_per_device: bool = False
    checkpoint_s: float = 60.0
    time_limit_s: float = 0.0  # 0: none
    mirror_s: float = 2.0
    grace_s: float = 5.0  # between a polite word and a kill
    division: UpdateSharding = UpdateSharding.CHOSEN  # of updates
    splits: bool = True  # what does not fit into memory even alone may be split
    sync_batchnorm: bool = False  # the parts of a step show each other their statistics
    reducer: str = "shared"  # or "group"
    has_lanes: bool = False  # a share of a GPU is a lane, which a process has for life
    cpus: int = 0  # cores of each worker on a GPU; 0: as many threads as are usual


def owners_of(shape: StepLayout, *, exact: bool) -> tuple[tuple[int, int], ...]:
    """Pieces of each rank: shards by count in exact mode, one part each in default mode."""
    if not shape.counts:
        return ()
    return as_owners(shape.counts if exact else (1,) * len(shape.seats))


def entry_mismatch(first: Ready, other: Ready) -> str:
    """What is wrong when two workers of a job loaded unlike trainings; empty if nothing is."""
    if first.fingerprint == other.fingerprint:
        return ""
    unlike = f"{first.fingerprint[:12]} and {other.fingerprint[:12]}"
    return (
        f"two workers loaded the entry and got unlike weights ({unlike}): it is not deterministic. Take "
        "all randomness from torch, NumPy or random after import, and none from the time, the process or the order of "
        "sets."
    )


def as_target(order: Order) -> Target:
    """An order as what a team understands."""
    if not isinstance(order, Assign):
        return Target(order.generation)
    allocation = order.allocation
    seats = [WorkerSlot(device, share.fraction, share.turn) for share in allocation.shares for device in share.devices]
    probe = order.purpose.steps if isinstance(order.purpose, Probe) else 0
    return Target(order.generation, tuple(seats), allocation.batch_size, allocation.parts, probe)
