"""Step source: draws the samples of each step and splits them into shards or per-device parts."""

from __future__ import annotations

from carpool.core.errors import InputError
from carpool.runtime.data.prefetch import BatchRequest
from carpool.runtime.data.sample_stream import SampleStream
from carpool.runtime.data.sampler import Cursor, StepSampler, batch_lengths
from carpool.runtime.engine.forward_backward import Step
from carpool.runtime.engine.training import Training
from carpool.runtime.reduce.shards import Bounds, check_batchnorm_samples, split_into_parts, split_into_shards


class StepSource:
    """Yields steps split into `shards` (exact mode), or with None into one part per device (default mode)."""

    def __init__(self, training: Training, seed: int, shards: int | None) -> None:
        self.stream = SampleStream(training.dataset, seed) if training.is_stream else None
        self._sampler = self.stream or StepSampler(training.num_samples, seed, training.shuffle)
        self._shards = shards
        self._batch_norms = training.batch_norms
        self._split_key: tuple[int, tuple[int, ...]] = (0, ())  # samples and parts of the last step
        self._split: Bounds = ()

    def step_at(self, cursor: Cursor, batch_size: int, parts: tuple[int, ...], max_micro_batch: int) -> Step:
        draw = self._sampler.draw(cursor, batch_size)
        key = (len(draw.samples), parts)
        if key != self._split_key:
            self._split_key, self._split = key, self._bounds(*key)
        return Step(draw, self._split, max_micro_batch)

    def upcoming(self, step: Step, pieces: range, batch_size: int, depth: int) -> list[BatchRequest]:
        """The batches of this step and the next ones, assuming that the split stays the same."""
        requests: list[BatchRequest] = []
        draw, bounds = step.draw, step.bounds
        for _ in range(1 + depth):
            held = [bounds[piece] for piece in pieces]
            requests += [BatchRequest(draw.at.epoch, draw.samples[start:end]) for start, end in held if start < end]
            draw = self._sampler.draw(draw.after, batch_size)
            bounds = self._bounds(len(draw.samples), self._split_key[1])
        return requests

    def check_batch_size(self, batch_size: int, offset: int) -> None:
        size = self._sampler.size
        if self.stream is not None and batch_size >= 1:
            return  # the length of an epoch's last batch is known only once it is read
        if not 1 <= batch_size <= size:
            raise InputError(
                f"batch size {batch_size}; the dataset has {size} samples", way_out="Set a smaller batch size."
            )
        if self._shards is not None and self._batch_norms:
            for length in batch_lengths(size, batch_size, offset):
                check_batchnorm_samples(length, batch_size, size, self._shards, self._batch_norms[0])

    def _bounds(self, num_samples: int, parts: tuple[int, ...]) -> Bounds:
        if self._shards is not None:
            return split_into_shards(num_samples, self._shards)
        return split_into_parts(num_samples, parts or (1,), 2 if self._batch_norms else 1)
