"""Pure state machine of a command job: launch, terminate, retry, finish.

A program with a `carpool.session` also reports its progress and keeps checkpoints: if it is killed, it is restarted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from carpool.core.messages import AssignApplied, JobFailed, JobFinished, ProgressReported, ReleaseApplied
from carpool.core.model import JobId
from carpool.runtime.job_state.actions import Emit, Ended, Note, Stopped
from carpool.runtime.job_state.types import Target, WorkerSlot
from carpool.runtime.process.protocol import Done, Joined, Message, Stepped, WorkerFailed


@dataclass(frozen=True, slots=True)
class Launch:
    """Start the command on these slots."""

    slots: tuple[WorkerSlot, ...]


@dataclass(frozen=True, slots=True)
class Terminate:
    """Ask the command to exit, and kill it after the grace period."""


CommandAction = Launch | Terminate | Emit | Note | Ended | Stopped


class CommandState:
    """State of one command; every method takes the time and returns the actions to carry out, in order."""

    def __init__(self, job: JobId, *, time_limit_s: float = 0.0, retries: int = 3) -> None:
        self.job = job
        self.target = Target(0)
        self.is_over = False
        self.slots: tuple[WorkerSlot, ...] = ()  # where it runs; none: it does not
        self.steps = 0  # done, as reported by its session
        self.has_session = False
        self._since = 0.0
        self._time_limit_s = time_limit_s
        self._acknowledged = 0
        self._is_terminating = False
        self._is_stopping = False
        self._failure = ""
        self._retries = retries
        self._kills = 0  # since a step was completed
        self._max_steps = 0
        self._samples_per_s = 0.0
        self._done: Done | None = None
        self._actions: list[CommandAction] = []

    @property
    def is_solo(self) -> bool:
        return len(self.slots) == 1

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
                known_loss = None if math.isnan(loss) else loss
                progress = ProgressReported(self.job, self._acknowledged, float(step), message.steps_per_s, known_loss)
                self._actions.append(Emit(progress))
            case WorkerFailed(error=error):
                self._actions.append(Note(error))
            case Done():
                self._done, self.steps = message, message.step
        return self._reconcile(at)

    def exited(self, at: float, code: int) -> list[CommandAction]:
        """Handle the command's exit; a negative code is the signal that killed it."""
        self.slots = ()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        if self._failure:
            self._end(self._failure)
        elif code == 0 and (self._done is not None or not self._is_terminating):
            self._end("")
        elif not self._is_terminating and not self._may_restart(code):
            self._end(f"the command {how}; see its log")
        elif not self._is_terminating:
            self._actions.append(Note(f"the command {how}; restarting it from its checkpoint"))
        self._is_terminating = self.has_session = False
        self._done = None
        return self._reconcile(at)

    def _may_restart(self, code: int) -> bool:
        self._kills += 1
        return code < 0 and self.has_session and self._kills < self._retries

    def start_failed(self, at: float, why: str) -> list[CommandAction]:
        self.slots = ()
        self._end(why)
        return self._reconcile(at)

    def stop(self, at: float) -> list[CommandAction]:
        """Terminate the command; it can be started again."""
        self._is_stopping = True
        return self._reconcile(at)

    def fail(self, at: float, error: str) -> list[CommandAction]:
        """Terminate the command and fail the job; the first error is the one reported."""
        self._failure = self._failure or error
        if not self.slots and not self.is_over:
            self._end(self._failure)
        return self._reconcile(at)

    def tick(self, at: float) -> list[CommandAction]:
        if self.slots and self._time_limit_s and at - self._since > self._time_limit_s and not self._failure:
            self._failure = f"exceeded its time limit of {self._time_limit_s:g} s"
        return self._reconcile(at)

    def _reconcile(self, at: float) -> list[CommandAction]:
        if not self.is_over:
            self._advance(at)
        actions, self._actions = self._actions, []
        return actions

    def _advance(self, at: float) -> None:
        wanted = () if self._is_stopping else self.target.slots
        moves = {slot.device for slot in self.slots} != {slot.device for slot in wanted}
        if self.slots and (self._failure or moves):
            if not self._is_terminating:
                self._is_terminating = True
                self._actions.append(Terminate())
            return
        if self._is_stopping:
            self.is_over = True
            self._actions.append(Stopped(self.steps))
            return
        if wanted and not self.slots:
            self._actions.append(Launch(wanted))
            self._since = at
        self.slots = wanted
        if self._acknowledged < self.target.generation:
            self._acknowledged = self.target.generation
            applied = AssignApplied if wanted else ReleaseApplied
            self._actions.append(Emit(applied(self.job, self._acknowledged, float(self.steps))))

    def _end(self, error: str) -> None:
        self.is_over = True
        self._actions.append(self._ended(error or "the command ended with exit code 0"))
        generation = self._acknowledged or self.target.generation
        end = JobFailed(self.job, generation, error) if error else JobFinished(self.job, generation)
        self._actions.append(Emit(end))

    def _ended(self, reason: str) -> Ended:
        done = self._done
        if done is None:
            return Ended(reason, steps=self.steps)
        loss = None if math.isnan(done.loss) else done.loss
        return Ended(done.reason, done.step, done.epoch, loss, done.metrics, done.digest or None, self._samples_per_s)
