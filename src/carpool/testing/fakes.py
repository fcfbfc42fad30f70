"""Stand-ins for the outside: a clock that is moved by hand, a backend that notes what it is told."""

from __future__ import annotations

from collections.abc import Sequence

from carpool.core.messages import (
    Assign,
    AssignApplied,
    Fact,
    JobCrashed,
    JobFailed,
    JobFinished,
    Order,
    ProgressReported,
    Release,
    ReleaseApplied,
)
from carpool.core.model import Allocation, JobId


class FakeClock:
    """A clock that stands still until it is told to go on. Implements the Clock port."""

    def __init__(self, at: float = 0.0) -> None:
        self._at = at

    def now(self) -> float:
        """Seconds since the origin."""
        return self._at

    def advance(self, seconds: float) -> float:
        """Let time pass; the new time."""
        assert seconds >= 0.0, f"time does not run backwards: {seconds} s"
        self._at += seconds
        return self._at


class FakeBackend:
    """Notes every order, and answers at once or when asked to. Implements the Backend port.

    It models what a backend owes the scheduler and nothing of the work: a test says itself how far a job is, and when
    it finishes or crashes.
    """

    def __init__(self, *, answers_at_once: bool = True) -> None:
        self.answers_at_once = answers_at_once
        self.orders: list[tuple[float, Order]] = []
        self.holds: dict[JobId, Allocation] = {}
        self.done: dict[JobId, float] = {}
        self._generation: dict[JobId, int] = {}  # of the newest order
        self._applied: dict[JobId, int] = {}
        self._over: set[JobId] = set()
        self._unanswered: list[Order] = []

    def apply(self, at: float, orders: Sequence[Order]) -> Sequence[Fact]:
        """Note orders; the answers, where it answers at once."""
        for order in orders:
            self.orders.append((at, order))
            newest = self._generation.get(order.job, 0)
            if order.job not in self._over and order.generation >= newest:
                self._generation[order.job] = order.generation
                self._unanswered.append(order)
        return self.answer() if self.answers_at_once else ()

    def answer(self) -> list[Fact]:
        """Carry out what is still open, in order; one fact for each order."""
        orders, self._unanswered = self._unanswered, []
        return [self._carry_out(order) for order in orders if order.job not in self._over]

    def last_order(self, job: str) -> Order | None:
        """The newest order for a job."""
        return next((order for _, order in reversed(self.orders) if order.job == job), None)

    # ------------------------------------------------------------------------------------- what a test lets happen
    def progress(self, job: str, done: float, rate: float = 1.0) -> ProgressReported:
        """A running job reports."""
        self.done[JobId(job)] = done
        return ProgressReported(JobId(job), self._applied[JobId(job)], done, rate)

    def finish(self, job: str) -> JobFinished:
        """A running job reaches its end."""
        return JobFinished(JobId(job), self._leave(job, over=True))

    def fail(self, job: str, error: str = "it went wrong") -> JobFailed:
        """A running job ends by its own fault."""
        return JobFailed(JobId(job), self._leave(job, over=True), error)

    def crash(self, job: str, error: str = "it was killed") -> JobCrashed:
        """A running job loses its processes."""
        return JobCrashed(JobId(job), self._leave(job, over=False), self.done.get(JobId(job), 0.0), error)

    # ---------------------------------------------------------------------------------------------------- inside
    def _carry_out(self, order: Order) -> Fact:
        self._applied[order.job] = order.generation
        done = self.done.get(order.job, 0.0)
        if isinstance(order, Assign):
            self.holds[order.job] = order.allocation
            return AssignApplied(order.job, order.generation, done)
        assert isinstance(order, Release)
        self.holds.pop(order.job, None)
        return ReleaseApplied(order.job, order.generation, done)

    def _leave(self, job: str, *, over: bool) -> int:
        name = JobId(job)
        assert name in self.holds, f"job {job!r} holds nothing here"
        del self.holds[name]
        if over:
            self._over.add(name)
        return self._applied[name]
