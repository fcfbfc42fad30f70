"""Local runs: a device's work on a task in one cycle, as one or more independent runs from the round's weights."""

from __future__ import annotations

import numpy as np

from carpool.federated.aggregation import as_types
from carpool.federated.messages import Work
from carpool.federated.updates import Array, Weights
from carpool.runtime.federation.flower_task import ClientAppTask
from carpool.runtime.federation.local_task import LocalTask, RoundProgress

RoundTask = LocalTask | ClientAppTask


class LocalRuns:
    """Makes the runs of an order one after another; the update is the mean of their weights, by samples.

    Each run starts from the round's weights with a new optimizer, on the samples after those of the run before. Passes
    in a row would take the weights of a device that has time for many of them to the optimum of its own data.
    """

    def __init__(self, task: RoundTask, work: Work, weights: Weights) -> None:
        self._task, self._work, self._initial = task, work, weights
        self._before = RoundProgress()  # of the runs that are done
        self._num_done = 0
        self._sums: dict[str, Array] = {}

    @property
    def progress(self) -> RoundProgress:
        """Of all runs together."""
        before, now = self._before, self._task.progress
        return RoundProgress(
            before.samples + now.samples,
            before.steps + now.steps,
            before.loss_sum + now.loss_sum,
            now.is_done and self._num_done == self._work.runs - 1,
        )

    def begin(self) -> None:
        """Begin the next run; it makes up for samples that earlier runs left out."""
        work, done = self._work, self._before.samples
        end = work.samples * (self._num_done + 1) // work.runs
        self._task.begin(self._initial, work.start + done, end - done, work.batch_size)

    def step(self) -> None:
        """Make one step; the first of a further run begins it."""
        if self._task.progress.is_done:
            self._keep()
            self.begin()
        self._task.step()

    def _keep(self) -> None:
        """Add the weights of a completed run."""
        self._sums = self._with_last()
        self._before = self.progress
        self._num_done += 1

    def weights(self) -> Weights:
        """The update; a single run's weights bit by bit."""
        if not self._num_done:
            return self._task.weights()
        sums, total = self._with_last(), self.progress.samples
        return as_types({name: value / total for name, value in sums.items()}, self._initial)

    def _with_last(self) -> dict[str, Array]:
        """Sum over runs, the current one included, of weights times samples."""
        samples = self._task.progress.samples
        if not samples:
            return self._sums
        added = {name: _wide(value) * samples for name, value in self._task.weights().items()}
        return {name: value + self._sums[name] for name, value in added.items()} if self._sums else added


def _wide(value: Array) -> Array:
    return np.asarray(value.astype(np.complex128 if value.dtype.kind == "c" else np.float64))
