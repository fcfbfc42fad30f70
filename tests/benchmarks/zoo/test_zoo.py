"""Every model builds, has the published number of parameters, learns, and is built alike after seeding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zoo_trainings as trainings
from torch import nn
from zoo import ENTRIES, MODELS

from carpool.core.errors import InputError, UnknownName
from carpool.runtime.data.batches import to_device
from carpool.runtime.engine.determinism import seed_entry
from carpool.runtime.engine.device_setup import place_training
from carpool.runtime.engine.trainer import Trainer
from carpool.runtime.state.digest import digest
from carpool.runtime.worker.entry_loader import load_training
from carpool.testing import plain_loop

ENTRY = str(ENTRIES)
# Sizes at which a step takes milliseconds.
TINY: dict[str, dict[str, Any]] = {
    "mlp": {"image": 8, "hidden": 8},
    "cnn": {"image": 8, "hidden": 4},
    "vgg16": {"width": 0.02},
    "vgg19": {"width": 0.02},
    "vgg16_flat": {"width": 0.1},
    "vgg19_flat": {"width": 0.1},
    "resnet18": {"width": 0.1, "image": 16},
    "resnet34": {"width": 0.1, "image": 16},
    "resnet50": {"width": 0.1, "image": 16},
    "resnet101": {"width": 0.1, "image": 8},
    "resnet152": {"width": 0.1, "image": 8},
    "mobilenet_v3": {"width": 0.25},
    "shufflenet_v2": {"width": 0.5},
    "densenet121": {"growth": 4, "image": 16},
    "squeezenet": {"width": 0.25},
    "inception_v3": {"width": 0.05},
    "lstm": {"tokens": 50, "hidden": 8, "length": 6},
    "ncf": {"users": 30, "items": 20},
    "bert_small": {"tokens": 50, "dim": 16, "heads": 2, "length": 24, "positions": 24},
    "bert_base": {"tokens": 50, "dim": 24, "length": 24, "positions": 24},
    "transformer": {"tokens": 50, "dim": 16, "heads": 2, "inner": 32, "length": 8},
    "deepspeech": {"bins": 48, "hidden": 8, "filters": 4, "frames": 40, "spoken": 5},
    "gcn": {"nodes": 60, "features": 40},
    "fastgcn": {"nodes": 60, "features": 40, "drawn": 20},
    "graphsage": {"nodes": 60, "features": 40, "hidden": 8, "neighbours": [3, 2]},
    "yolo": {"classes": 4, "width": 0.1, "image": 64},
}
# What the papers, or the implementations everybody uses, have for these sizes.
PUBLISHED: dict[str, tuple[str, dict[str, Any], int]] = {
    "VGG16-BN": ("vgg16", {"classes": 1000}, 138_365_992),
    "VGG16": ("vgg16", {"classes": 1000, "norm": False}, 138_357_544),
    "VGG19-BN": ("vgg19", {"classes": 1000}, 143_678_248),
    "VGG16-BN, ten classes": ("vgg16", {}, 134_309_962),
    "VGG16-BN, CIFAR": ("vgg16_flat", {}, 14_728_266),
    "VGG19-BN, CIFAR": ("vgg19_flat", {}, 20_040_522),
    "ResNet18": ("resnet18", {"classes": 1000, "stem": "imagenet"}, 11_689_512),
    "ResNet34": ("resnet34", {"classes": 1000, "stem": "imagenet"}, 21_797_672),
    "ResNet50": ("resnet50", {"classes": 1000, "stem": "imagenet"}, 25_557_032),
    "ResNet101": ("resnet101", {"classes": 1000, "stem": "imagenet"}, 44_549_160),
    "ResNet152": ("resnet152", {"classes": 1000, "stem": "imagenet"}, 60_192_808),
    "ResNet18, CIFAR": ("resnet18", {}, 11_173_962),
    "ResNet50, CIFAR": ("resnet50", {}, 23_520_842),
    "ResNet101, CIFAR": ("resnet101", {}, 42_512_970),
    "MobileNetV3-Large": ("mobilenet_v3", {"classes": 1000}, 5_483_032),
    "ShuffleNetV2 1.0": ("shufflenet_v2", {"classes": 1000}, 2_278_604),
    "ShuffleNetV2 0.5": ("shufflenet_v2", {"classes": 1000, "width": 0.5}, 1_366_792),
    "DenseNet121": ("densenet121", {"classes": 1000, "stem": "imagenet"}, 7_978_856),
    "SqueezeNet 1.1": ("squeezenet", {"classes": 1000, "stem": "imagenet"}, 1_235_496),
    "Inception V3 without its side exit": ("inception_v3", {"classes": 1000, "stem": "imagenet"}, 23_834_568),
    "NeuMF, MovieLens-20M": (
        "ncf",
        {"users": 138_493, "items": 26_744, "factors": 64, "layers": (256, 256, 128, 64)},
        31_832_577,
    ),
    "BERT-base, question answering": ("bert_base", {}, 108_893_186),
    "BERT-small": ("bert_small", {}, 28_502_018),
    "GCN, Cora": ("gcn", {}, 23_063),
    "YOLOv5s": ("yolo", {}, 7_235_389),
}
OURS = {
    "mlp": 855_050,
    "cnn": 94_762,
    "mobilenet_v3": 4_214_842,
    "shufflenet_v2": 1_263_854,
    "densenet121": 6_956_426,
    "squeezenet": 727_626,
    "inception_v3": 21_806_058,
    "lstm": 19_780_400,  # the paper says 20 M
    "ncf": 392_601,
    "transformer": 63_084_544,  # the paper says 65 M
    "deepspeech": 41_142_528,
    "graphsage": 368_775,
}


def tiny(name: str, batch_size: int = 4, **options: Any) -> Any:
    return trainings.training(name, batch_size, seed=0, **{"steps": 2, **TINY[name], **options})


def on_meta(name: str, **sizes: Any) -> nn.Module:
    with torch.device("meta"):
        return MODELS[name](**sizes)


def parameters_of(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("name", "sizes", "count"), PUBLISHED.values(), ids=PUBLISHED)
def test_published_parameter_counts(name: str, sizes: dict[str, Any], count: int) -> None:
    assert parameters_of(on_meta(name, **sizes)) == count


@pytest.mark.parametrize(("name", "count"), OURS.items())
def test_parameter_counts_of_the_default_sizes(name: str, count: int) -> None:
    assert parameters_of(on_meta(name)) == count


@pytest.mark.parametrize("name", MODELS)
def test_a_step_reaches_every_parameter(name: str) -> None:
    training = tiny(name)
    batch = training.dataset.batch(torch.arange(4))
    loss = training.loss(training.model, batch)
    total = loss[0] / loss[1] if isinstance(loss, tuple) else loss
    total.backward()
    assert torch.isfinite(total)
    for place, parameter in training.model.named_parameters():
        assert parameter.grad is not None, place
        assert torch.isfinite(parameter.grad).all(), place


@pytest.mark.parametrize("name", MODELS)
def test_entries_load_train_and_evaluate(name: str) -> None:
    trainer = Trainer(load_training(f"{ENTRY}:{name}", {"batch_size": 4, "steps": 2, **TINY[name]}))
    done = list(trainer.steps())
    assert [step.step for step in done] == [1, 2]
    assert all(torch.tensor(step.loss).isfinite() for step in done)
    assert trainer.progress.metrics.keys() == {"loss"}


@pytest.mark.parametrize("name", sorted(set(MODELS) - {"resnet34", "resnet50", "resnet101", "resnet152", "vgg19"}))
def test_the_same_seed_builds_the_same_model(name: str) -> None:
    first, second, other = (digest(tiny_model(name, seed)) for seed in (0, 0, 1))
    assert first == second
    assert first != other


def tiny_model(name: str, seed: int) -> nn.Module:
    options = {"seed": seed, "samples": 4, **TINY[name]}
    model: nn.Module = trainings.training(name, 4, **options).model
    return model


@pytest.mark.parametrize("name", ["cnn", "resnet18", "mobilenet_v3", "shufflenet_v2", "inception_v3", "vgg16", "yolo"])
def test_channels_last_computes_the_same(name: str) -> None:
    plain, turned = tiny(name), tiny(name, channels_last=True)
    place_training(turned, torch.device("cpu"))
    weights = [p for p in turned.model.parameters() if p.dim() == 4 and p.shape[1] > 1 and p.shape[2] > 1]
    assert all(weight.is_contiguous(memory_format=torch.channels_last) for weight in weights)
    batch = plain.dataset.batch(torch.arange(4))
    one, two = (t.loss(t.model.eval(), batch) for t in (plain, turned))
    torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["resnet18", "lstm", "ncf", "bert_small", "transformer", "gcn"])
def test_a_cut_batch_has_the_same_gradient(name: str) -> None:
    """Losses are means over samples, or (sum, count), and not over something that depends on the cut."""
    whole, cut = (gradients(name, shards) for shards in (1, 2))
    for one, two in zip(whole, cut, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6)


def gradients(name: str, shards: int) -> list[torch.Tensor]:
    training = tiny(name)
    training.model.eval()  # dropout and BatchNorm do depend on the cut
    trainer = Trainer(training, exact=True, shards=shards)
    step = trainer.next_step()
    total = trainer.combine(step, trainer.contribute(step, range(shards)))
    divided = total.values / total.values[trainer.layout.loss + 1] if shards > 1 and name == "transformer" else None
    return trainer.layout.gradient_views(total.values if divided is None else divided)


@pytest.mark.parametrize("name", ["mlp", "cnn", "lstm", "ncf", "gcn", "graphsage"])
def test_trainings_learn(name: str) -> None:
    more: dict[str, dict[str, Any]] = {"cnn": {"optimizer": "adam"}, "lstm": {"dropout": 0.0, "tokens": 20}}
    losses = plain_loop(tiny(name, 16, steps=40, lr=0.02, **more.get(name, {}))).losses
    assert sum(losses[-8:]) < 0.9 * sum(losses[:8])


def test_every_model_has_a_task_an_entry_and_a_tiny_size() -> None:
    assert list(MODELS) == list(trainings.RECIPES) == list(TINY)
    assert all(getattr(trainings, name).__name__ == name for name in MODELS)


def test_names_that_are_not_there() -> None:
    with pytest.raises(UnknownName, match=r"unknown model 'resnet81'\. Did you mean resnet18"):
        MODELS["resnet81"]
    with pytest.raises(UnknownName, match=r"mlp: unknown argument 'hiden'\. Did you mean hidden\?"):
        trainings.training("mlp", hiden=3)
    with pytest.raises(UnknownName, match=r"mlp: unknown optimizer 'adm'\. Did you mean adam"):
        trainings.training("mlp", 4, optimizer="adm")
    with pytest.raises(InputError, match=r"mlp: optimizer is 'sgd' without lr\. Give its learning rate too\."):
        trainings.training("mlp", 4, optimizer="sgd")


def test_translation_counts_words_and_not_padding() -> None:
    training = tiny("transformer")
    source, begun, said = training.dataset.batch(torch.arange(4))
    total, count = training.loss(training.model.eval(), (source, begun, said))
    assert int(count) == int((said != 0).sum()) < said.numel()
    longer = [torch.nn.functional.pad(words, (0, 3)) for words in (source, begun, said)]
    torch.testing.assert_close(training.loss(training.model, tuple(longer)), (total, count), rtol=1e-5, atol=1e-4)


def test_data_are_the_same_whatever_was_drawn_before() -> None:
    seed_entry(1)
    first = tiny("ncf").dataset.tensors
    torch.rand(7)
    second = tiny("ncf").dataset.tensors
    assert all(torch.equal(one, two) for one, two in zip(first, second, strict=True))


def test_a_graph_moves_once_to_each_device() -> None:
    batch = tiny("gcn").dataset.batch(torch.arange(2))
    meta = torch.device("meta")
    moved = to_device(batch, meta)
    assert moved.graph.weights.device == meta
    assert to_device(batch, meta).graph is moved.graph
    assert moved.graph.to("cpu") is batch.graph
