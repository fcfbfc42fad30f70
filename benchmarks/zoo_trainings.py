"""A training of each model on synthetic data, as an entry: ``benchmarks/zoo_trainings.py:resnet18``.

Every entry takes the arguments of `training`, less the name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from zoo import MODELS, made
from zoo.boxes import detection_loss
from zoo.ctc import ctc_loss
from zoo.graphs import NodeBatch

from carpool.core.errors import InputError, UnknownName
from carpool.runtime.data.batches import to_device
from carpool.runtime.engine.determinism import seed_entry
from carpool.runtime.engine.stop_criteria import Stop
from carpool.runtime.engine.training import Loss, Training

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adadelta": torch.optim.Adadelta,
}


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a model learns: data, loss, and how it is usually trained."""

    data: Callable[..., made.Halves]  # (size, seed, sizes by name)
    loss: Loss
    batch_size: int
    optimizer: str
    lr: float


def training(
    name: str,
    batch_size: int | None = None,
    *,
    steps: int = 100,
    seed: int | None = None,
    samples: int | None = None,
    optimizer: str = "",
    lr: float | None = None,
    channels_last: bool = False,
    autocast: str | None = None,
    **sizes: Any,
) -> Training:
    """Train a model of the zoo for some steps, on 8 batches of made-up data unless ``samples`` says how much.

    ``sizes`` go to the model and to the data, whichever knows them: ``training("lstm", hidden=128, length=20)``. An
    entry is called with torch seeded; with ``seed`` this function seeds it itself, for those who call it by hand.
    """
    build, recipe = MODELS[name], RECIPES[name]
    batch_size = batch_size or recipe.batch_size
    for_model, for_data = _dealt(name, sizes, build, recipe.data)
    data = recipe.data(samples or 8 * batch_size, seed or 0, **for_data)
    if seed is not None:
        seed_entry(seed)
    model = build(**for_model)
    kind = optimizer or recipe.optimizer
    if kind not in OPTIMIZERS:
        raise UnknownName("optimizer", kind, OPTIMIZERS, where=name)
    if lr is None:
        if kind != recipe.optimizer:
            raise InputError(f"optimizer is {kind!r} without lr", where=name, way_out="Give its learning rate too.")
        lr = recipe.lr
    return Training(
        model=model,
        optimizer=OPTIMIZERS[kind](model.parameters(), lr=lr),
        dataset=data.train,
        loss=recipe.loss,
        batch_size=batch_size,
        stop=Stop(steps=steps),
        evaluate=_test_loss(data.test, recipe.loss, batch_size),
        evaluate_every=steps,  # at the end only: what is measured is training
        autocast=autocast,
        channels_last=channels_last,
    )


def _dealt(
    name: str, sizes: Mapping[str, Any], *takers: Callable[..., object]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The sizes that the model takes, and those that the data take; some are for both."""
    known = [_keywords(taker) for taker in takers]
    for size in sizes:
        if size not in known[0] | known[1]:
            raise UnknownName("argument", size, known[0] | known[1], where=name)
    model, data = ({size: value for size, value in sizes.items() if size in names} for names in known)
    return model, data


def _keywords(function: Callable[..., object]) -> set[str]:
    parameters = inspect.signature(function).parameters.values()
    return {parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}


def _test_loss(data: made.Data, loss: Loss, batch_size: int) -> Callable[[nn.Module], dict[str, float]]:
    def evaluate(model: nn.Module) -> dict[str, float]:
        device = next(model.parameters()).device
        total = weight = 0.0
        for start in range(0, len(data), batch_size):
            numbers = torch.arange(start, min(start + batch_size, len(data)))
            result = loss(model, to_device(data.batch(numbers), device))
            summed, count = result if isinstance(result, tuple) else (result * len(numbers), len(numbers))
            total += float(summed)
            weight += float(count)
        return {"loss": total / weight}

    return evaluate


# -- losses: each a mean over the samples, or (sum, count) ------------------------------------------------------------


def _class_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def _next_token_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def _rating_loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    return binary_cross_entropy_with_logits(model(batch[0], batch[1]), batch[2])


def _span_loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
    words, kinds, begin, end = batch
    logits = model(words, kinds)
    return (cross_entropy(logits[..., 0], begin) + cross_entropy(logits[..., 1], end)) / 2


def _translation_loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    source, begun, said = batch
    logits = model(source, begun).flatten(0, 1)
    total = cross_entropy(logits, said.flatten(), ignore_index=0, reduction="sum", label_smoothing=0.1)
    return total, (said != 0).sum()


def _speech_loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    sound, labels, lengths = batch
    return ctc_loss(model(sound), labels, lengths).mean()


def _node_loss(model: nn.Module, batch: NodeBatch) -> Tensor:
    return cross_entropy(model(batch.graph, batch.nodes), batch.labels)


def _box_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return detection_loss(model(batch[0]), batch[1])


# -- what each model learns -------------------------------------------------------------------------------------------

_PICTURES = Recipe(made.images, _class_loss, 128, "sgd", 0.05)
_PLAIN_PICTURES = Recipe(made.images, _class_loss, 128, "adam", 3e-4)  # without BatchNorm a large rate diverges
_WIDE_PICTURES = Recipe(made.images, _class_loss, 128, "sgd", 0.01)
_QUESTIONS = Recipe(made.questions, _span_loss, 8, "adamw", 3e-5)
_NODES = Recipe(made.nodes, _node_loss, 140, "adam", 0.01)

RECIPES: dict[str, Recipe] = {
    "mlp": _PLAIN_PICTURES,
    "cnn": _PICTURES,
    "vgg16": _WIDE_PICTURES,
    "vgg19": _WIDE_PICTURES,
    "vgg16_flat": _PICTURES,
    "vgg19_flat": _PICTURES,
    "resnet18": _PICTURES,
    "resnet34": _PICTURES,
    "resnet50": _PICTURES,
    "resnet101": _PICTURES,
    "resnet152": _PICTURES,
    "mobilenet_v3": _PICTURES,
    "shufflenet_v2": _PICTURES,
    "densenet121": _PICTURES,
    "squeezenet": _PLAIN_PICTURES,
    "inception_v3": _PICTURES,
    "lstm": Recipe(made.sentences, _next_token_loss, 32, "adam", 1e-3),
    "ncf": Recipe(made.ratings, _rating_loss, 1024, "adam", 1e-3),
    "bert_small": _QUESTIONS,
    "bert_base": _QUESTIONS,
    "transformer": Recipe(made.translations, _translation_loss, 64, "adam", 2e-4),
    "deepspeech": Recipe(made.speech, _speech_loss, 16, "adam", 3e-4),
    "gcn": _NODES,
    "fastgcn": _NODES,
    "graphsage": _NODES,
    "yolo": Recipe(made.scenes, _box_loss, 16, "sgd", 0.01),
}


def _entry(name: str) -> Callable[..., Training]:
    def entry(batch_size: int | None = None, **options: Any) -> Training:
        return training(name, batch_size, **options)

    entry.__name__ = entry.__qualname__ = name
    return entry


# Written out, so that a job file can be checked without running anything.
mlp = _entry("mlp")
cnn = _entry("cnn")
vgg16 = _entry("vgg16")
vgg19 = _entry("vgg19")
vgg16_flat = _entry("vgg16_flat")
vgg19_flat = _entry("vgg19_flat")
resnet18 = _entry("resnet18")
resnet34 = _entry("resnet34")
resnet50 = _entry("resnet50")
resnet101 = _entry("resnet101")
resnet152 = _entry("resnet152")
mobilenet_v3 = _entry("mobilenet_v3")
shufflenet_v2 = _entry("shufflenet_v2")
densenet121 = _entry("densenet121")
squeezenet = _entry("squeezenet")
inception_v3 = _entry("inception_v3")
lstm = _entry("lstm")
ncf = _entry("ncf")
bert_small = _entry("bert_small")
bert_base = _entry("bert_base")
transformer = _entry("transformer")
deepspeech = _entry("deepspeech")
gcn = _entry("gcn")
fastgcn = _entry("fastgcn")
graphsage = _entry("graphsage")
yolo = _entry("yolo")
