"""What ran out of memory even alone is split into micro-steps from that step on; pure.

A step's gradient is a mean over samples, so passes over a few samples each, weighted by how many, add up to the same
gradient; only the rounding differs. That is why exact jobs are not split, and batch-normalised ones are not because
their statistics would be taken over fewer samples. Steps before the first split stay whole when they are made again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from carpool.runtime.actions import MicroSteps
from carpool.runtime.crew import Rules
from carpool.runtime.devices import LocalDevice
from carpool.runtime.protocol import Broke, Ready
from carpool.runtime.shards import Limits, most_samples


@dataclass(frozen=True, slots=True)
class Shortage:
    """A step that ran out of memory on a device although its neighbours stood still."""

    said: Broke
    device: LocalDevice
    batch_size: int

    @property
    def words(self) -> str:
        """What happened, with the memory that there is."""
        size = f" ({self.device.memory_bytes / 2**30:.1f} GiB)" if self.device.memory_bytes else ""
        what = f"step {self.said.step + 1} of {self.batch_size} samples"
        return f"{what} needs more memory than {self.device.name} has{size}, even alone: {self.said.error}."


class Splits:
    """How a job's steps have been split so far."""

    def __init__(self, known: Sequence[MicroSteps] = ()) -> None:
        self._known = list(known)

    @property
    def limits(self) -> Limits:
        """For the workers."""
        return tuple((split.step, split.samples) for split in self._known)

    def halve(self, step: int, samples: int) -> MicroSteps | None:
        """Split the passes over so many samples once more, from a step on; None: there is nothing to split."""
        now = min(most_samples(self.limits, step) or samples, samples)
        if now < 2:
            return None
        split = MicroSteps(step, -(-now // 2))
        self._known.append(split)
        return split


def why_not_split(short: Shortage, rules: Rules, ready: Ready | None) -> str:
    """Why a job must fail where others would be split, with a way out; empty: it may be split."""
    if not short.said.samples:
        why = "It was not a pass over its samples: evaluate in smaller batches, or choose a smaller model."
    elif rules.exact:
        why = "An exact job is not split into micro-steps, which would change its bits: {lower}, or set exact = false."
    elif ready is not None and ready.has_batch_norm:
        why = "A batch-normalised job is not split into micro-steps, which would change its statistics: {lower}."
    elif not rules.splits:
        why = "Steps are not split into micro-steps here: {lower}."
    else:
        return ""
    return f"{short.words} " + why.format(lower=f"lower batch_size ({short.batch_size})")
