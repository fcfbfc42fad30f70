"""What the scheduler has been told of its orders; pure."""

from __future__ import annotations

from carpool.core.messages import AssignApplied, ReleaseApplied
from carpool.core.model import JobId
from carpool.runtime.actions import Emit
from carpool.runtime.crew import Wish


class Answers:
    """Says once of each order that it is in force."""

    def __init__(self, job: JobId) -> None:
        self._job = job
        self.generation = 0  # newest that was answered
        self._is_release = True  # whether that answer was a release

    @property
    def is_assigned(self) -> bool:
        """Whether the scheduler believes that the job runs."""
        return bool(self.generation) and not self._is_release

    def is_open(self, wish: Wish) -> bool:
        """Whether an order waits for its answer."""
        return self.generation < wish.generation

    def assigned(self, generation: int, step: int) -> Emit:
        """The job runs as ordered, from this step on."""
        self.generation, self._is_release = generation, False
        return Emit(AssignApplied(self._job, generation, float(step)))

    def released(self, generation: int, step: int) -> Emit:
        """The job holds nothing any more, and has done so many steps."""
        self.generation, self._is_release = generation, True
        return Emit(ReleaseApplied(self._job, generation, float(step)))

    def last_generation(self, wish: Wish) -> int:
        """The generation that the end of a job belongs to."""
        return wish.generation if self._is_release else self.generation
