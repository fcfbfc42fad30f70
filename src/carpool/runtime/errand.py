"""A command job as a state machine: any program, placed and shared, begun again after it was taken off; pure."""

from __future__ import annotations

from dataclasses import dataclass

from carpool.core.messages import AssignApplied, JobFailed, JobFinished, ReleaseApplied
from carpool.core.model import JobId
from carpool.runtime.actions import Emit, Ended, Stopped, Tell
from carpool.runtime.crew import Seat, Wish


@dataclass(frozen=True, slots=True)
class Launch:
    """Start the command on these seats."""

    seats: tuple[Seat, ...]


@dataclass(frozen=True, slots=True)
class Terminate:
    """Ask the command to end, and end it by force after a grace."""


Move = Launch | Terminate | Emit | Tell | Ended | Stopped


class Errand:
    """One command. Every method takes the time and returns what is to be done, in order."""

    def __init__(self, job: JobId, *, time_limit_s: float = 0.0) -> None:
        self.job = job
        self.wish = Wish(0)
        self.is_over = False
        self._seats: tuple[Seat, ...] = ()  # where it runs; none: it does not
        self._since = 0.0
        self._time_limit_s = time_limit_s
        self._answered = 0
        self._is_ending = False
        self._is_stopping = False
        self._failure = ""
        self._moves: list[Move] = []

    def order(self, at: float, wish: Wish) -> list[Move]:
        """The scheduler wants this; what is older than the newest order is ignored."""
        if wish.generation > self.wish.generation and not self.is_over:
            self.wish = wish
        return self._settled(at)

    def exited(self, at: float, code: int) -> list[Move]:
        """The command has ended; below zero: by that signal."""
        self._seats = ()
        if self._failure:
            self._end(self._failure)
        elif not self._is_ending and code == 0:
            self._end("")
        elif not self._is_ending:
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            self._end(f"the command {how}; what it said stands in its log")
        self._is_ending = False
        return self._settled(at)

    def could_not_start(self, at: float, why: str) -> list[Move]:
        """There is no such program, or no such folder."""
        self._seats = ()
        self._end(why)
        return self._settled(at)

    def stop(self, at: float) -> list[Move]:
        """End the command; it can be begun again."""
        self._is_stopping = True
        return self._settled(at)

    def tick(self, at: float) -> list[Move]:
        """Time has passed."""
        if self._seats and self._time_limit_s and at - self._since > self._time_limit_s and not self._failure:
            self._failure = f"it ran for longer than its time limit of {self._time_limit_s:g} s"
        return self._settled(at)

    def _settled(self, at: float) -> list[Move]:
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
            self._moves.append(Stopped(0))
            return
        if wished and not self._seats:
            self._moves.append(Launch(wished))
            self._since = at
        self._seats = wished
        if self._answered < self.wish.generation:
            self._answered = self.wish.generation
            applied = AssignApplied if wished else ReleaseApplied
            self._moves.append(Emit(applied(self.job, self._answered, 0.0)))

    def _end(self, error: str) -> None:
        self.is_over = True
        self._moves.append(Ended(error or "the command ended with exit code 0"))
        generation = self._answered or self.wish.generation
        self._moves.append(Emit(JobFailed(self.job, generation, error) if error else JobFinished(self.job, generation)))
