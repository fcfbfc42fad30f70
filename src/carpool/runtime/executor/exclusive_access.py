"""Exclusive device access: pauses a job's neighbours while it retries after running out of memory or is measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from carpool.core.model import JobId
from carpool.runtime.executor.job_table import TrainingJob
from carpool.runtime.job_state.actions import Action, RequestExclusive


class ExclusiveAccess:
    """Jobs that want to be alone on a device, one after another."""

    def __init__(
        self,
        trainings: Mapping[JobId, TrainingJob],
        do: Callable[[TrainingJob, Sequence[Action]], None],
        clock: Callable[[], float],
    ) -> None:
        self._trainings = trainings
        self._do = do
        self._clock = clock
        self._queue: list[
            tuple[JobId, RequestExclusive]
        ] = []  # jobs that want to be alone on a device; the first one is
        self._is_granted = False
        self._held: set[JobId] = set()  # that stand still for it

    def ask(self, job: JobId, wish: RequestExclusive) -> None:
        """A job wants to be alone on a device."""
        self._queue.append((job, wish))

    def see_to(self) -> None:
        """Let the first job that asks for it be alone on its device once the others there stand still."""
        if not self._queue or self._is_granted:
            return
        at = self._clock()
        first, wish = self._queue[0]
        self._is_granted = True  # before anything below comes back here
        neighbours = self._neighbours(first, wish.device)
        for training in neighbours:
            self._held.add(training.job)
            self._do(training, training.team.hold(at, held=True, clears=wish.clears))
        if all(t.team.has_made_room if wish.clears else t.team.is_still for t in neighbours):
            self._do(self._trainings[first], self._trainings[first].team.left_alone(at))
        else:
            self._is_granted = False  # looked at again with the next event

    def leave(self, job: JobId) -> None:
        """A job need not be alone any more: the others go on."""
        at = self._clock()
        was_first = bool(self._queue) and self._queue[0][0] == job
        self._queue = [entry for entry in self._queue if entry[0] != job]
        if not was_first:
            return
        held, self._held, self._is_granted = self._held, set(), False
        for other in sorted(held & self._trainings.keys()):
            training = self._trainings[other]
            self._do(training, training.team.hold(at, held=False))

    def _neighbours(self, job: JobId, device: int) -> list[TrainingJob]:
        return [
            training
            for other, training in self._trainings.items()
            if other != job and not training.team.is_over and device in training.devices.values()
        ]
