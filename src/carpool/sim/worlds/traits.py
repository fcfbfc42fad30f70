"""What a parametric world knows of a model, of a device kind, and of the price of changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any, NamedTuple


class Allowed(NamedTuple):
    """The values a parameter may take."""

    low: float = -inf
    high: float = inf
    above: bool = False  # strictly above `low`

    def admit(self, value: float) -> bool:
        """Whether a value is inside."""
        return (value > self.low if self.above else value >= self.low) and value <= self.high

    def __str__(self) -> str:
        least = f"{'above' if self.above else 'at least'} {self.low:g}"
        return least if self.high == inf else f"{least} and at most {self.high:g}"


def number(default: Any, *, low: float = -inf, high: float = inf, above: bool = False) -> Any:
    """A dataclass field with limits, for readers of files to check."""
    if isinstance(default, dict):
        return field(default_factory=dict, metadata={"limits": Allowed(low, high, above)})
    return field(default=default, metadata={"limits": Allowed(low, high, above)})


@dataclass(frozen=True, slots=True)
class ModelTraits:
    """One model on the reference kind. The defaults stand for a middling convolutional network.

    - A step over m samples on n devices takes `fixed_s` + `per_sample_s`·m/n to compute (T = a + b·m) and
      `sync_s` + `sync_more_s`·(n−2) + `network_s`·(nodes−1) to synchronise (n ≥ 2), together
      (compute^γ + sync^γ)^(1/γ) with γ = `overlap`, 1 being no overlap (the form of Pollux, OSDI'21). So two devices
      may be slower than one, and four quicker than both.
    - SM and bandwidth use follow the portion of a step that computes, b·m/(a + b·m): small batches leave devices idle.
    - Loss after the portion k of the work: l(k) = 1/(b0·k + b1) + b2 through `loss` = (start, end, floor b2).
    - Gradient noise scale φ(k) = φ0·(φ1/φ0)^k through `noise_scale` = (φ0, φ1), in samples; it grows over training.
    """

    batch_size: int = number(64, low=1)  # the training's own, on each device asked for
    fixed_s: float = number(0.01, low=0.0)  # a
    per_sample_s: float = number(0.001, low=0.0, above=True)  # b
    sm: float = number(0.5, low=0.0, high=1.0, above=True)  # of one reference device, at `batch_size`
    memory_bw: float = number(0.3, low=0.0, high=1.0)
    sync_s: float = number(0.005, low=0.0)
    sync_more_s: float = number(0.0005, low=0.0)
    network_s: float = number(0.01, low=0.0)
    overlap: float = number(1.5, low=1.0)
    memory: int = number(1 << 30, low=0)  # bytes on each device whatever the batch: weights, optimizer, context
    memory_per_sample: int = number(16 << 20, low=0)
    loss: tuple[float, ...] = number((2.3, 0.1, 0.02), low=0.0)
    noise_scale: tuple[float, ...] = number((256.0, 4096.0), low=0.0, above=True)
    work: float = number(600.0, low=0.0, above=True)  # of jobs that do not state theirs: seconds on reference devices
    start_s: float | None = number(None, low=0.0)  # cold start, where it differs from the general price
    slowdown: Mapping[str, float] = number({}, low=0.0, above=True)  # by kind, where it differs from the kind's own

    def fill(self, samples: float) -> float:
        """Portion of a step over that many samples on one device that computes."""
        compute = self.per_sample_s * samples
        return compute / (self.fixed_s + compute) if compute else 0.0

    def loss_at(self, portion: float) -> float:
        """The loss after a portion of the work."""
        start, end, floor = self.loss
        b1 = 1.0 / (start - floor)
        b0 = 1.0 / (end - floor) - b1
        return 1.0 / (b0 * portion + b1) + floor

    def noise_at(self, portion: float) -> float:
        """The gradient noise scale after a portion of the work, in samples."""
        first, last = self.noise_scale
        return float(first * (last / first) ** portion)


@dataclass(frozen=True, slots=True)
class KindTraits:
    """One kind of device."""

    slowdown: float = number(1.0, low=0.0, above=True)  # step time over that on the reference kind
    memory: int = number(0, low=0)  # bytes; 0: unknown, not checked


@dataclass(frozen=True, slots=True)
class Prices:
    """Seconds a job stands still at a change. The defaults are of the order measured on an H200."""

    start_s: float = number(8.0, low=0.0)  # cold: a new process up to its first step
    resize_s: float = number(1.0, low=0.0)  # other devices
    share_s: float = number(0.5, low=0.0)  # another fraction: a warm replacement takes over at a step's end
    batch_s: float = number(0.5, low=0.0)  # another batch size: the step is captured again
    switch_s: float = number(0.0002, low=0.0)  # another turn among residents
