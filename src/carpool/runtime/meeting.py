"""Small vectors that the ranks of a step show each other in the middle of their passes, through shared memory.

    behind a rank's contribution in its slot:  how many vectors it has shown | the last one | the one before it

Whoever shows its vector n + 1 has read all vectors n, so two places, taken by turns, are enough. A count is made of
formation, step and number within the step, so that what was left earlier is never taken for news, and a rank that had
no samples in some step is in time for the next one.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable

import torch
from torch import Tensor

from carpool.runtime.errors import TrainingError
from carpool.runtime.passes import Step
from carpool.runtime.reducer import GivenUp
from carpool.runtime.slots import Slots, padded

_COUNT_BYTES = padded(8)
_STEP_BITS, _NUMBER_BITS = 28, 15  # of a count; the rest is the formation's
_LOOK_S = 5e-5  # between two looks whether the others are there
_LOOKS = 20  # after which it is also asked whether they will ever be
PATIENCE_S = 600.0  # a part may take that much longer than another


def meeting_bytes(room: int) -> int:
    """What meetings over vectors of so many numbers take in a slot."""
    return _COUNT_BYTES + 2 * padded(8 * room)


class Meeting:
    """One rank's view of the meetings of a formation in default mode, where every rank has one slot."""

    def __init__(
        self, fd: int, slots: Slots, rank: int, formation: int, room: int, is_given_up: Callable[[], bool]
    ) -> None:
        memory = mmap.mmap(fd, slots.num_bytes)
        starts = [slots.offset(0, slot + 1) - meeting_bytes(room) for slot in range(slots.num_slots)]
        self._counts = [memoryview(memory)[start : start + 8].cast("q") for start in starts]
        offsets = [(start + _COUNT_BYTES, start + _COUNT_BYTES + padded(8 * room)) for start in starts]
        self._places = [
            [torch.frombuffer(memory, dtype=torch.float64, count=room, offset=offset) for offset in by_turns]
            for by_turns in offsets
        ]
        self._rank = rank
        self._formation = formation
        self._shown = 0  # the count of the vector shown last
        self._is_given_up = is_given_up
        self._members: tuple[int, ...] = ()

    def attend(self, step: Step) -> None:
        """The next vectors belong to this step; only ranks that have samples in it show any."""
        self._shown = ((self._formation << _STEP_BITS) + step.number) << _NUMBER_BITS
        self._members = tuple(rank for rank, (start, end) in enumerate(step.bounds) if start < end)

    def show(self, vector: Tensor) -> Tensor:
        """The vectors of all members, a row each, in the order of their ranks; waits until all have shown theirs."""
        turn, size = self._shown % 2, vector.numel()
        self._places[self._rank][turn][:size] = vector
        self._shown += 1
        self._counts[self._rank][0] = self._shown
        for rank in self._members:
            if self._counts[rank][0] < self._shown:
                self._await(rank)
        return torch.stack([self._places[rank][turn][:size] for rank in self._members])

    def _await(self, rank: int) -> None:
        patient_until, looks = time.monotonic() + PATIENCE_S, 0
        while self._counts[rank][0] < self._shown:
            time.sleep(_LOOK_S)
            looks += 1
            if looks % _LOOKS:
                continue
            if self._is_given_up():
                raise GivenUp("told while waiting for the statistics of the others")
            if time.monotonic() > patient_until:
                raise TrainingError(
                    f"rank {rank} has not shown its statistics for {PATIENCE_S:.0f} s. With sync_batchnorm = true "
                    "every part of a step must pass the same BatchNorm layers in the same order; else set it to false."
                )
