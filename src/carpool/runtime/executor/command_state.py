"""Pure state machine of a command job: launch, terminate, retry, finish.

A program with a `carpool.session` also says how far it is, and keeps checkpoints: one that is killed is begun again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from carpool.core.messages import AssignApplied, JobFailed, JobFinished, ProgressReported, ReleaseApplied
from carpool.core.model import JobId
from carpool.runtime.job_state.actions import Emit, Ended, Stopped, Tell
from carpool.runtime.job_state.types import Target, WorkerSlot
from carpool.runtime.process.protocol import Done, Joined, Message, Stepped, WorkerFailed


@dataclass(frozen=True, slots=True)
class Launch:
    """Start the command on these seats."""

    seats: tuple[WorkerSlot, ...]


@dataclass(frozen=True, slots=True)
class Terminate:
    """Ask the command to end, and end it by force after a grace."""


CommandAction = Launch | Terminate | Emit | Tell | Ended | Stopped


class CommandState:
    """One command. Every method takes the time and returns what is to be done, in order."""

    def __init__(self, job: JobId, *, time_limit_s: float = 0.0, retries: int = 3) -> None:
        self.job = job
        self.wish = Target(0)
        self.is_over = False
        self._seats: tuple[WorkerSlot, ...] = ()  # where it runs; none: it does not
        self._since = 0.0
        self._time_limit_s = time_limit_s
        self._answered = 0
        self._is_ending = False
        self._is_stopping = False
        self._failure = ""
        self._retries = retries
        self._deaths = 0  # since a step was completed
        self._steps = 0  # done, as a session said
        self._most_steps = 0
        self._samples_per_s = 0.0
        self._done: Done | None = None
        self.has_session = False
        self._moves: list[CommandAction] = []

    def order(self, at: float, wish: Target) -> list[CommandAction]:
        """The scheduler wants this; what is older than the newest order is ignored."""
        if wish.generation > self.wish.generation and not self.is_over:
            self.wish = wish
        return self._settled(at)

    @property
    def seats(self) -> tuple[WorkerSlot, ...]:
        """Where it runs; none: it does not."""
        return self._seats

    @property
    def steps(self) -> int:
        """Steps done, as its session said."""
        return self._steps

    @property
    def is_solo(self) -> bool:
        """Whether it runs on a single device."""
        return len(self._seats) == 1

    def said(self, at: float, message: Message) -> list[CommandAction]:
        """Its session said something."""
        match message:
            case Joined(step):
                self.has_session, self._steps = True, step
                if step:
                    self._moves.append(Tell(f"goes on from its checkpoint of step {step}"))
            case Stepped(step=step, loss=loss):
                if step > self._most_steps:
                    self._most_steps, self._deaths = step, 0
                self._steps, self._samples_per_s = step, message.samples_per_s
                shown = None if math.isnan(loss) else loss
                progress = ProgressReported(self.job, self._answered, float(step), message.steps_per_s, shown)
                self._moves.append(Emit(progress))
            case WorkerFailed(error=error):
                self._moves.append(Tell(error))
            case Done():
                self._done, self._steps = message, message.step
        return self._settled(at)

    def exited(self, at: float, code: int) -> list[CommandAction]:
        """The command has ended; below zero: by that signal."""
        self._seats = ()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        if self._failure:
            self._end(self._failure)
        elif code == 0 and (self._done is not None or not self._is_ending):
            self._end("")
        elif not self._is_ending and not self._may_be_begun_again(code):
            self._end(f"the command {how}; what it said stands in its log")
        elif not self._is_ending:
            self._moves.append(Tell(f"the command {how} and is begun again from its checkpoint"))
        self._is_ending = self.has_session = False
        self._done = None
        return self._settled(at)

    def _may_be_begun_again(self, code: int) -> bool:
        """Somebody with a session was killed, and not too often without a step in between."""
        self._deaths += 1
        return code < 0 and self.has_session and self._deaths < self._retries

    def could_not_start(self, at: float, why: str) -> list[CommandAction]:
        """There is no such program, or no such folder."""
        self._seats = ()
        self._end(why)
        return self._settled(at)

    def stop(self, at: float) -> list[CommandAction]:
        """End the command; it can be begun again."""
        self._is_stopping = True
        return self._settled(at)

    def tick(self, at: float) -> list[CommandAction]:
        """Time has passed."""
        if self._seats and self._time_limit_s and at - self._since > self._time_limit_s and not self._failure:
            self._failure = f"it ran for longer than its time limit of {self._time_limit_s:g} s"
        return self._settled(at)

    def _settled(self, at: float) -> list[CommandAction]:
        if not self.is_over:
            self._settle(at)
        moves, self._moves = self._moves, []
        return moves

    def _settle(self, at: float) -> None:
        wished = () if self._is_stopping else self.wish.seats
        moves_away = {seat.device for seat in self._seats} != {seat.device for seat in wished}
        if self._seats and (self._failure or moves_away):
            if not self._is_ending:
                self._is_ending = True
                self._moves.append(Terminate())
            return
        if self._is_stopping:
            self.is_over = True
            self._moves.append(Stopped(self._steps))
            return
        if wished and not self._seats:
            self._moves.append(Launch(wished))
            self._since = at
        self._seats = wished
        if self._answered < self.wish.generation:
            self._answered = self.wish.generation
            applied = AssignApplied if wished else ReleaseApplied
            self._moves.append(Emit(applied(self.job, self._answered, float(self._steps))))

    def _end(self, error: str) -> None:
        self.is_over = True
        self._moves.append(self._ended(error or "the command ended with exit code 0"))
        generation = self._answered or self.wish.generation
        self._moves.append(Emit(JobFailed(self.job, generation, error) if error else JobFinished(self.job, generation)))

    def _ended(self, reason: str) -> Ended:
        done = self._done
        if done is None:
            return Ended(reason, steps=self._steps)
        loss = None if math.isnan(done.loss) else done.loss
        return Ended(done.reason, done.step, done.epoch, loss, done.metrics, done.digest or None, self._samples_per_s)
