"""Exclusive device access: pauses a job's neighbours while it is measured, or retries after running out of memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from carpool.core.model import JobId
from carpool.jobs.devices import LocalDevice, devices_of_gpu
from carpool.runtime.executor.job_table import TrainingJob
from carpool.runtime.job_state.actions import Action, RequestExclusive


class ExclusiveAccess:
    """Grants exclusive access to one job after another."""

    def __init__(
        self,
        trainings: Mapping[JobId, TrainingJob],
        devices: Mapping[int, LocalDevice],
        run: Callable[[TrainingJob, Sequence[Action]], None],
        clock: Callable[[], float],
    ) -> None:
        self._trainings = trainings
        self._devices = devices
        self._run = run
        self._clock = clock
        self._queue: list[tuple[JobId, RequestExclusive]] = []  # the first one has access, or gets it next
        self._is_granted = False
        self._paused: set[JobId] = set()

    def request(self, job: JobId, request: RequestExclusive) -> None:
        self._queue.append((job, request))

    def update(self) -> None:
        """Pause the neighbours of the first job in the queue, and grant it access once they are idle."""
        if not self._queue or self._is_granted:
            return
        at = self._clock()
        first, request = self._queue[0]
        self._is_granted = True  # the calls below call this method again
        neighbours = self._neighbours(first, request)
        for training in neighbours:
            self._paused.add(training.job)
            self._run(training, training.machine.pause(at, paused=True, free_memory=request.release_memory))
        states = [training.state for training in neighbours]
        if all(state.has_released_memory if request.release_memory else state.is_idle for state in states):
            self._run(self._trainings[first], self._trainings[first].machine.exclusive_granted(at))
        else:
            self._is_granted = False  # tried again after the next event

    def release(self, job: JobId) -> None:
        """Drop a job's request; if it had access, its neighbours continue."""
        at = self._clock()
        was_first = bool(self._queue) and self._queue[0][0] == job
        self._queue = [entry for entry in self._queue if entry[0] != job]
        if not was_first:
            return
        paused, self._paused, self._is_granted = self._paused, set(), False
        for other in sorted(paused & self._trainings.keys()):
            training = self._trainings[other]
            self._run(training, training.machine.pause(at, paused=False))

    def _neighbours(self, job: JobId, request: RequestExclusive) -> list[TrainingJob]:
        """The other jobs on the device; those on all lanes of its GPU where its memory is needed."""
        own = self._devices.get(request.device)
        shared = {request.device}
        if own is not None and request.release_memory:
            shared.update(devices_of_gpu(self._devices.values(), own))
        return [
            training
            for other, training in self._trainings.items()
            if other != job and not training.state.is_over and not shared.isdisjoint(training.devices.values())
        ]
