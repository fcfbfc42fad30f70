"""Step source: yields the samples of each step, split into shards or per-device parts, and looks ahead."""

from __future__ import annotations

from carpool.core.errors import InputError
from carpool.runtime.data.prefetch import BatchRequest
from carpool.runtime.data.sampler import Cursor, StepSampler, batch_lengths
from carpool.runtime.engine.forward_backward import Step
from carpool.runtime.engine.training import Training
from carpool.runtime.reduce.shards import Bounds, check_batchnorm_samples, cut_into_parts, cut_into_shards


class StepSource:
    """Gives steps: cut into `shards` in exact mode, else (None) into as many parts as there are devices."""

    def __init__(self, training: Training, seed: int, shards: int | None) -> None:
        self._order = StepSampler(training.num_samples, seed, training.shuffle)
        self._shards = shards
        self._batch_norms = training.batch_norms
        self._cut_for: tuple[int, tuple[int, ...]] = (0, ())  # samples of the last step, and its parts
        self._cut: Bounds = ()

    def step(self, cursor: Cursor, batch_size: int, parts: tuple[int, ...], most: int) -> Step:
        """The step at the cursor, with at most so many samples in a pass (0: any number)."""
        draw = self._order.draw(cursor, batch_size)
        cut_for = (len(draw.samples), parts)
        if cut_for != self._cut_for:  # else as in the step before
            self._cut_for, self._cut = cut_for, self._bounds(*cut_for)
        return Step(draw, self._cut, most)

    def ahead(self, step: Step, pieces: range, batch_size: int, depth: int) -> list[BatchRequest]:
        """The batches of this step and of the next ones, guessing that they are cut alike."""
        requests: list[BatchRequest] = []
        draw, bounds = step.draw, step.bounds
        for _ in range(1 + depth):
            held = [bounds[piece] for piece in pieces]
            requests += [BatchRequest(draw.at.epoch, draw.samples[start:end]) for start, end in held if start < end]
            draw = self._order.draw(draw.after, batch_size)
            bounds = self._bounds(len(draw.samples), self._cut_for[1])
        return requests

    def check(self, batch_size: int, offset: int) -> None:
        """Refuse, before it starts, more samples than there are, and shards too small for batch normalisation."""
        if not 1 <= batch_size <= self._order.size:
            raise InputError(
                f"batch size {batch_size}; the data holds {self._order.size} samples", way_out="Set batch to less."
            )
        if self._shards is not None and self._batch_norms:
            for length in batch_lengths(self._order.size, batch_size, offset):
                check_batchnorm_samples(length, batch_size, self._order.size, self._shards, self._batch_norms[0])

    def _bounds(self, num_samples: int, parts: tuple[int, ...]) -> Bounds:
        if self._shards is not None:
            return cut_into_shards(num_samples, self._shards)
        return cut_into_parts(num_samples, parts or (1,), 2 if self._batch_norms else 1)
