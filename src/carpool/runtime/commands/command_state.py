"""Pure state machine of a command job: launch, park, restore, move, terminate, retry, finish.

A command that loses its devices is parked: its processes stop and later continue from the same point. One that can
resume by itself is terminated instead: one with a `carpool.session` has written a checkpoint, one with `resumable`
handles its own.

One that ran out of GPU memory beside other jobs, or was hit by the fault of one, starts once more, from the beginning,
when it has its GPU to itself. One that was parked and does not fit beside other jobs continues then.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from carpool.core.messages import (
    AssignApplied,
    JobFailed,
    JobFinished,
    ProgressReported,
    ReleaseApplied,
    ResumabilityChanged,
)
from carpool.core.model import JobId
from carpool.runtime.job_state.actions import Emit, Ended, Note, Stopped
from carpool.runtime.job_state.types import Target, WorkerSlot
from carpool.runtime.process.protocol import Done, Joined, Message, ProgressFound, Stepped, WorkerFailed

# Errors that neighbours on a GPU can cause: memory that they hold (in the words of torch, CUDA and JAX), and a fault of
# one of them, which ends all clients of MPS.
_BY_NEIGHBOURS = re.compile(
    r"(?i:out of memory|outofmemory|illegal memory access|launch failure)|RESOURCE_EXHAUSTED|\bMPS\b"
)

_NEIGHBOUR_S = 10.0  # a failure can be due to a neighbour that ended this long ago: several jobs may fail at once
PARKING_TIMEOUT_S = 600.0  # for parking and for restoring; a driver copies about 2 GB a second


class CommandPhase(StrEnum):
    """What the processes of a command are doing."""

    IDLE = "idle"  # it has none
    RUNNING = "running"
    PARKING = "parking"  # their state on the GPU is locked and copied, then they are stopped
    PARKED = "parked"
    RESTORING = "restoring"
    TERMINATING = "terminating"


@dataclass(frozen=True, slots=True)
class Launch:
    """Start the command on these slots."""

    slots: tuple[WorkerSlot, ...]


@dataclass(frozen=True, slots=True)
class Move:
    """Bind the running command to the cores of these slots."""

    slots: tuple[WorkerSlot, ...]


@dataclass(frozen=True, slots=True)
class Park:
    """Stop the command's processes and free its devices; answered by `parked` or `parking_failed`."""


@dataclass(frozen=True, slots=True)
class Restore:
    """Continue the parked command on these slots; answered by `restored` or `restoring_failed`."""

    slots: tuple[WorkerSlot, ...]


@dataclass(frozen=True, slots=True)
class Terminate:
    """Ask the command to exit, and kill it after the grace period."""


CommandAction = Launch | Move | Park | Restore | Terminate | Emit | Note | Ended | Stopped


class Beside(NamedTuple):
    """Other jobs that have processes on the GPUs of a command."""

    is_occupied: bool = False
    is_reserved: bool = False  # by a command that runs there alone


class CommandState:
    """State of one command; every method takes the time and returns the actions to carry out, in order."""

    def __init__(
        self,
        job: JobId,
        *,
        time_limit_s: float = 0.0,
        retries: int = 2,
        resumable: bool = False,
        can_park: bool = False,  # on every device that it may be assigned
        cpu_devices: Collection[int] = (),
    ) -> None:
        self.job = job
        self.target = Target(0)
        self.phase = CommandPhase.IDLE
        self.is_over = False
        self.slots: tuple[WorkerSlot, ...] = ()  # where it computes; none: it does not
        self.steps = 0  # done, as reported by its session
        self.has_session = False
        self.beside = Beside()
        self._occupied_at = -math.inf  # when other jobs were last seen beside it
        self.runs_alone = False  # it failed beside others in a way that these can cause
        self._home: tuple[WorkerSlot, ...] = ()  # where its processes were before they were parked
        self._since = 0.0  # in this phase
        self._ran_s = 0.0  # in earlier running phases of the same processes
        self._time_limit_s = time_limit_s
        self._resumable = self._reported_resumable = resumable
        self.can_park = can_park
        self._cpu_devices = frozenset(cpu_devices)
        self._acknowledged = 0
        self._is_stopping = False
        self._failure = ""
        self._retries = retries
        self._kills = 0  # since a step was completed
        self._max_steps = 0
        self._samples_per_s = 0.0
        self._loss: float | None = None
        self._done: Done | None = None
        self._actions: list[CommandAction] = []

    @property
    def is_solo(self) -> bool:
        return len(self.slots) == 1

    @property
    def has_processes(self) -> bool:
        return self.phase is not CommandPhase.IDLE

    @property
    def uses_devices(self) -> bool:
        """Whether its processes hold memory of their devices."""
        return self.phase not in {CommandPhase.IDLE, CommandPhase.PARKED}

    def look(self, at: float, beside: Beside) -> None:
        """Record the other jobs on its GPUs."""
        self.beside = beside
        if beside.is_occupied:
            self._occupied_at = at

    def order(self, at: float, target: Target) -> list[CommandAction]:
        """Follow a new order; one that is older than the current target is ignored."""
        if target.generation > self.target.generation and not self.is_over:
            self.target = target
        return self._reconcile(at)

    def message(self, at: float, message: Message) -> list[CommandAction]:
        match message:
            case Joined(step):
                self.has_session, self.steps = True, step
                if step:
                    self._actions.append(Note(f"resumes from its checkpoint of step {step}"))
            case Stepped(step=step, loss=loss):
                if step > self._max_steps:
                    self._max_steps, self._kills = step, 0
                self.steps, self._samples_per_s = step, message.samples_per_s
                self._loss = None if math.isnan(loss) else loss
                progress = ProgressReported(self.job, self._acknowledged, float(step), message.steps_per_s, self._loss)
                self._actions.append(Emit(progress))
            case ProgressFound(done=done, steps_per_s=rate) if self.slots and not self.has_session:
                self.steps, self._loss = int(done), message.loss
                if rate > 0.0:  # known after the second report
                    progress = ProgressReported(self.job, self._acknowledged, done, rate, message.loss)
                    self._actions.append(Emit(progress))
            case WorkerFailed(error=error):
                self._actions.append(Note(error))
            case Done():
                self._done, self.steps = message, message.step
        return self._reconcile(at)

    def parked(self, at: float, how: str) -> list[CommandAction]:
        """Handle that its processes are stopped and its devices free."""
        if self.phase is CommandPhase.PARKING:
            self.slots = ()
            self._actions.append(Note(f"parked: {how}"))
            self._enter(at, CommandPhase.PARKED)
        return self._reconcile(at)

    def parking_failed(self, at: float, why: str) -> list[CommandAction]:
        """Terminate it: it still runs, and its devices are needed."""
        if self.phase is CommandPhase.PARKING:
            self._terminate(at, f"it cannot be parked ({why}): it is stopped and will start from the beginning")
        return self._reconcile(at)

    def restored(self, at: float) -> list[CommandAction]:
        if self.phase is CommandPhase.RESTORING:
            self.slots = self._home
            self._actions.append(Note("continues where it was parked"))
            self._enter(at, CommandPhase.RUNNING)
        return self._reconcile(at)

    def restoring_failed(self, at: float, why: str, *, is_parked: bool = True) -> list[CommandAction]:
        """If it is still parked beside other jobs, wait for them: it may lack their memory. Otherwise it fails."""
        if self.phase is CommandPhase.RESTORING and is_parked and self.beside.is_occupied:
            self.runs_alone = True
            self._actions.append(
                Note(f"cannot be continued beside other jobs ({why}): it continues when it has its GPU to itself")
            )
            self._enter(at, CommandPhase.PARKED)
        elif self.phase is CommandPhase.RESTORING:
            self._failure = f"the parked command could not be continued: {why}"
        return self._reconcile(at)

    def exited(self, at: float, code: int, cause: str = "", last_line: str = "") -> list[CommandAction]:
        """Handle the command's exit with `code`: its exit code, or the negated number of the signal that killed it.

        `cause` says why, if that is known (out of memory, a full disk); `last_line` is what the command printed last.
        """
        phase = self.phase
        self.slots = ()
        self._enter(at, CommandPhase.IDLE)
        self._ran_s = 0.0
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        if phase in {CommandPhase.PARKED, CommandPhase.RESTORING}:
            how += " while it was parked"
        because = f": {cause}" if cause else ""
        is_terminating = phase is CommandPhase.TERMINATING
        if self._failure:
            self._end(self._failure)
        elif code == 0 and (self._done is not None or not is_terminating):
            self._end("")
        elif not is_terminating and self._is_crowded_out(at, code, last_line):
            self.runs_alone = True
            note = f"failed beside other jobs on its GPU ({last_line}): it starts again when it has the GPU to itself"
            self._actions.append(Note(note))
        elif not is_terminating and not self._may_restart(code):
            said = f" after it printed: {last_line}" if last_line else ""
            self._end(f"the command {how}{said} (carpool logs {self.job}){because}")
        elif not is_terminating:
            self._actions.append(Note(f"the command {how}; restarting it from its checkpoint{because}"))
        self.has_session = False
        self._done = None
        return self._reconcile(at)

    def _is_crowded_out(self, at: float, code: int, last_line: str) -> bool:
        can_be_theirs = code > 0 and _BY_NEIGHBOURS.search(last_line) is not None
        return can_be_theirs and at - self._occupied_at <= _NEIGHBOUR_S and not self.runs_alone

    def _may_restart(self, code: int) -> bool:
        self._kills += 1
        return code < 0 and self.has_session and self._kills <= self._retries

    def start_failed(self, at: float, why: str) -> list[CommandAction]:
        self.slots = ()
        self._enter(at, CommandPhase.IDLE)
        self._end(why)
        return self._reconcile(at)

    def stop(self, at: float) -> list[CommandAction]:
        """Terminate the command; it can be started again."""
        self._is_stopping = True
        return self._reconcile(at)

    def fail(self, at: float, error: str) -> list[CommandAction]:
        """Terminate the command and fail the job; the first error is the one reported."""
        self._failure = self._failure or error
        if not self.has_processes and not self.is_over:
            self._end(self._failure)
        return self._reconcile(at)

    def tick(self, at: float) -> list[CommandAction]:
        spent_s = at - self._since
        match self.phase:
            case CommandPhase.RUNNING if self._time_limit_s and self._ran_s + spent_s > self._time_limit_s:
                self._failure = self._failure or f"exceeded its time limit of {self._time_limit_s:g} s"
            case CommandPhase.PARKING if spent_s > PARKING_TIMEOUT_S:
                return self.parking_failed(at, f"not done after {PARKING_TIMEOUT_S:g} s")
            case CommandPhase.RESTORING if spent_s > PARKING_TIMEOUT_S:
                return self.restoring_failed(at, f"not done after {PARKING_TIMEOUT_S:g} s", is_parked=False)
            case _:
                pass
        return self._reconcile(at)

    def _reconcile(self, at: float) -> list[CommandAction]:
        if not self.is_over:
            self._advance(at)
        actions, self._actions = self._actions, []
        return actions

    def _advance(self, at: float) -> None:
        wanted = () if self._is_stopping else self.target.slots
        if self.phase is not CommandPhase.IDLE and (self._failure or self._is_stopping):
            self._terminate(at)
        elif self.phase is CommandPhase.IDLE:
            self._start_or_stop(at, wanted)
        elif self.phase is CommandPhase.RUNNING:
            self._keep_running(at, wanted)
        elif self.phase is CommandPhase.PARKED:
            self._keep_parked(at, wanted)

    def _start_or_stop(self, at: float, wanted: tuple[WorkerSlot, ...]) -> None:
        if self._is_stopping:
            self.is_over = True
            self._actions.append(Stopped(self.steps))
            return
        if wanted and not self._has_to_wait:
            self._actions.append(Launch(wanted))
            self._enter(at, CommandPhase.RUNNING)
        self._acknowledge(wanted)

    def _keep_running(self, at: float, wanted: tuple[WorkerSlot, ...]) -> None:
        if _devices(wanted) == _devices(self.slots):
            self._acknowledge(wanted)
        elif wanted and self._is_on_cpu(wanted, self.slots):
            self._actions.append(Move(wanted))
            self._acknowledge(wanted)
        elif wanted or self._resumable or self.has_session:
            self._terminate(at)
        else:
            self._home = self.slots
            self._actions.append(Park())
            self._enter(at, CommandPhase.PARKING)

    def _keep_parked(self, at: float, wanted: tuple[WorkerSlot, ...]) -> None:
        can_continue = _devices(wanted) == _devices(self._home) or self._is_on_cpu(wanted, self._home)
        if not wanted or (can_continue and self._has_to_wait):
            self._acknowledge(wanted)
        elif can_continue:
            self._home = wanted
            self._actions.append(Restore(wanted))
            self._enter(at, CommandPhase.RESTORING)
        else:
            self._terminate(at, "its state is on another GPU, so it starts from the beginning")

    @property
    def _has_to_wait(self) -> bool:
        """Whether it must not compute beside the jobs that are on its GPUs now."""
        return self.beside.is_occupied if self.runs_alone else self.beside.is_reserved

    def _is_on_cpu(self, *places: tuple[WorkerSlot, ...]) -> bool:
        return all(_devices(slots) <= self._cpu_devices for slots in places)

    def _terminate(self, at: float, why: str = "") -> None:
        if self.phase is CommandPhase.TERMINATING:
            return
        if why:
            self._actions.append(Note(why))
        self._actions.append(Terminate())
        self._enter(at, CommandPhase.TERMINATING)

    def _enter(self, at: float, phase: CommandPhase) -> None:
        if self.phase is CommandPhase.RUNNING:
            self._ran_s += at - self._since
        self.phase, self._since = phase, at

    def _acknowledge(self, wanted: tuple[WorkerSlot, ...]) -> None:
        self.slots = wanted
        if self._acknowledged < self.target.generation:
            self._acknowledged = self.target.generation
            applied = AssignApplied if wanted else ReleaseApplied
            self._actions.append(Emit(applied(self.job, self._acknowledged, float(self.steps))))
        self._report_resumability()

    def _report_resumability(self) -> None:
        resumable = self._resumable or self.has_session or self.can_park
        if self.slots and resumable != self._reported_resumable:
            self._reported_resumable = resumable
            self._actions.append(Emit(ResumabilityChanged(self.job, resumable)))

    def _end(self, error: str) -> None:
        self.is_over = True
        self._actions.append(self._ended(error or "the command ended with exit code 0"))
        generation = self._acknowledged or self.target.generation
        end = JobFailed(self.job, generation, error) if error else JobFinished(self.job, generation)
        self._actions.append(Emit(end))

    def _ended(self, reason: str) -> Ended:
        done = self._done
        if done is None:
            return Ended(reason, steps=self.steps, loss=self._loss)
        loss = None if math.isnan(done.loss) else done.loss
        return Ended(done.reason, done.step, done.epoch, loss, done.metrics, done.digest or None, self._samples_per_s)


def _devices(slots: tuple[WorkerSlot, ...]) -> frozenset[int]:
    return frozenset(slot.device for slot in slots)
