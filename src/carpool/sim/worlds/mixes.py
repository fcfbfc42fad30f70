"""Models and device kinds drawn from a seed: named mixes of networks with plausible parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from carpool.core.errors import UnknownName
from carpool.sim.worlds.traits import KindTraits, ModelTraits

_GIB = 1 << 30
# Memory of kinds that have a usual one.
_MEMORY = {"K80": 12, "T4": 16, "P100": 16, "V100": 16, "A100": 40, "H100": 80, "H200": 141}
# Slowdown of the first, second … kind, drawn for each model; later kinds are drawn like the last.
_SLOWDOWNS = ((1.0, 1.0), (1.2, 2.5), (1.8, 4.0), (2.5, 6.3))


@dataclass(frozen=True, slots=True)
class Mix:
    """Names of models, and the ranges that what they use of a device is drawn from."""

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
    """Traits of each model of a mix (or of a list of names); a model's draw does not depend on the others."""
    if isinstance(models, str):
        if models not in MIXES:
            raise UnknownName("mix", models, MIXES)
        mix = MIXES[models]
    else:
        mix = Mix(tuple(models))
    return {name: _draw_model(Random(f"{seed}/model/{name}"), mix, kinds) for name in mix.models}


def draw_kinds(kinds: Sequence[str]) -> dict[str, KindTraits]:
    """Traits of the kinds, the fastest first; models bring their own slowdowns."""
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
