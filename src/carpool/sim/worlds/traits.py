"""Parameters of the parametric world: models, device types and costs of changes, given or drawn from a seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from random import Random
from typing import Any, NamedTuple

from carpool.core.errors import UnknownName


class ValueRange(NamedTuple):
    """The values a parameter may take."""

    low: float = -inf
    high: float = inf
    above: bool = False  # strictly above `low`

    def admit(self, value: float) -> bool:
        return (value > self.low if self.above else value >= self.low) and value <= self.high

    def __str__(self) -> str:
        least = f"{'above' if self.above else 'at least'} {self.low:g}"
        return least if self.high == inf else f"{least} and at most {self.high:g}"


def number(default: Any, *, low: float = -inf, high: float = inf, above: bool = False) -> Any:
    """A dataclass field with limits, for readers of files to check."""
    if isinstance(default, dict):
        return field(default_factory=dict, metadata={"limits": ValueRange(low, high, above)})
    return field(default=default, metadata={"limits": ValueRange(low, high, above)})


@dataclass(frozen=True, slots=True)
class ModelTraits:
    """One model on the reference type. The defaults stand for an average convolutional network."""

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
        """Portion of a step over that many samples on one device that is compute."""
        compute = self.per_sample_s * samples
        return compute / (self.fixed_s + compute) if compute else 0.0

    def loss_at(self, portion: float) -> float:
        start, end, floor = self.loss
        b1 = 1.0 / (start - floor)
        b0 = 1.0 / (end - floor) - b1
        return 1.0 / (b0 * portion + b1) + floor

    def noise_at(self, portion: float) -> float:
        first, last = self.noise_scale
        return float(first * (last / first) ** portion)


@dataclass(frozen=True, slots=True)
class KindTraits:
    """One device type."""

    slowdown: float = number(1.0, low=0.0, above=True)  # step time over that on the reference kind
    memory: int = number(0, low=0)  # bytes; 0: unknown, not checked


@dataclass(frozen=True, slots=True)
class ChangeCosts:
    """Seconds of stall at a change. The defaults have the magnitude measured on an H200."""

    start_s: float = number(8.0, low=0.0)  # cold: a new process up to its first step
    resize_s: float = number(1.0, low=0.0)  # other devices
    share_s: float = number(0.5, low=0.0)  # another fraction: a warm replacement takes over at a step's end
    batch_s: float = number(0.5, low=0.0)  # another batch size: the step is captured again
    switch_s: float = number(0.0002, low=0.0)  # another turn among residents


_GIB = 1 << 30
# Memory of kinds that have a usual one.
_MEMORY = {"K80": 12, "T4": 16, "P100": 16, "V100": 16, "A100": 40, "H100": 80, "H200": 141}
# Slowdown of the first, second … kind, drawn for each model; later kinds are drawn like the last.
_SLOWDOWNS = ((1.0, 1.0), (1.2, 2.5), (1.8, 4.0), (2.5, 6.3))


@dataclass(frozen=True, slots=True)
class Mix:
    """Names of models, and the ranges of their device use."""

    models: tuple[str, ...]
    sm: tuple[float, float] = (0.15, 0.95)
    memory_bw: tuple[float, float] = (0.05, 0.8)


_VISION = ("vgg16", "resnet18", "resnet50", "resnet101", "mobilenetv3", "shufflenetv2", "densenet121")
MIXES: dict[str, Mix] = {
    "small": Mix(("resnet18", "mobilenetv3", "shufflenetv2", "mlp", "lstm"), (0.1, 0.4), (0.02, 0.25)),
    "large": Mix(("vgg16", "resnet101", "bert", "transformer"), (0.7, 1.0), (0.4, 0.9)),
    "vision": Mix(_VISION),
    "colocation": Mix(("vgg16", "squeezenet", "resnet50", "ncf", "ad-gcl", "lstm", "bert", "yolov5", "resnet18")),
    "unlike": Mix(
        ("vgg19", "resnet50", "inceptionv3", "bert", "transformer", "deepspeech", "fastgcn", "graphsage"),
    ),
}


def draw_models(seed: int, models: str | Sequence[str], kinds: Sequence[str]) -> dict[str, ModelTraits]:
    """Traits of each model of a mix (or list of names), drawn independently of each other."""
    if isinstance(models, str):
        if models not in MIXES:
            raise UnknownName("mix", models, MIXES)
        mix = MIXES[models]
    else:
        mix = Mix(tuple(models))
    return {name: _draw_model(Random(f"{seed}/model/{name}"), mix, kinds) for name in mix.models}


def draw_kinds(kinds: Sequence[str]) -> dict[str, KindTraits]:
    """Traits of device types, fastest first; models have their own slowdowns."""
    middling = [(low + high) / 2 for low, high in _SLOWDOWNS]
    return {
        kind: KindTraits(middling[min(place, len(middling) - 1)], _MEMORY.get(kind, 16) * _GIB)
        for place, kind in enumerate(kinds)
    }


def _draw_model(rng: Random, mix: Mix, kinds: Sequence[str]) -> ModelTraits:
    batch_size = rng.choice((32, 64, 128, 256))
    step_s = 0.06 * 10.0 ** rng.random()  # 0.06 to 0.6 s
    fixed = rng.uniform(0.05, 0.5)
    start, floor = rng.uniform(1.5, 7.0), rng.uniform(0.0, 0.5)
    noise = batch_size * rng.uniform(0.5, 4.0)
    traits = ModelTraits(
        batch_size=batch_size,
        fixed_s=step_s * fixed,
        per_sample_s=step_s * (1.0 - fixed) / batch_size,
        sm=rng.uniform(*mix.sm),
        memory_bw=rng.uniform(*mix.memory_bw),
        sync_s=step_s * rng.uniform(0.02, 0.6),
        sync_more_s=step_s * rng.uniform(0.0, 0.03),
        network_s=step_s * rng.uniform(0.05, 0.5),
        overlap=rng.uniform(1.0, 3.0),
        memory=int(rng.uniform(0.5, 3.0) * _GIB),
        memory_per_sample=int(rng.uniform(0.5, 3.0) * _GIB / batch_size),
        loss=(start, floor + (start - floor) * rng.uniform(0.02, 0.2), floor),
        noise_scale=(noise, noise * rng.uniform(4.0, 40.0)),
        work=rng.uniform(60.0, 1200.0),
    )
    ranges = [_SLOWDOWNS[min(place, len(_SLOWDOWNS) - 1)] for place in range(len(kinds))]
    return replace(traits, slowdown={kind: rng.uniform(*limits) for kind, limits in zip(kinds, ranges, strict=True)})
