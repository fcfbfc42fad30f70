"""The models that benchmarks train, by name: own compact definitions of published architectures.

They keep fixed shapes, never wait for the device in the loss and change nothing in place, so that a training step can
be captured as a graph. `trainings` makes a training of each on made-up data of the right shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from torch import nn

from carpool.core.errors import UnknownName
from zoo.bert import bert
from zoo.deepspeech import deepspeech
from zoo.densenet import densenet
from zoo.graphs import fastgcn, gcn, graphsage
from zoo.inception import inception_v3
from zoo.lstm import lstm
from zoo.mobilenet import mobilenet_v3
from zoo.ncf import ncf
from zoo.resnet import resnet
from zoo.shufflenet import shufflenet_v2
from zoo.small import cnn, mlp
from zoo.squeezenet import squeezenet
from zoo.transformer import transformer
from zoo.vgg import vgg
from zoo.yolo import yolo

__all__ = ["ENTRIES", "MODELS", "Builder", "Models"]

ENTRIES = Path(__file__).resolve().parents[1] / "zoo_trainings.py"  # a job's entry is f"{ENTRIES}:{model}"

Builder = Callable[..., nn.Module]  # takes sizes by name, all with defaults


class Models(dict[str, Builder]):
    """Builders by name; an unknown name gets "did you mean"."""

    def __missing__(self, name: str) -> Builder:
        raise UnknownName("model", name, self)


MODELS = Models(
    mlp=mlp,
    cnn=cnn,
    vgg16=partial(vgg, 16),
    vgg19=partial(vgg, 19),
    vgg16_flat=partial(vgg, 16, head="flat"),
    vgg19_flat=partial(vgg, 19, head="flat"),
    resnet18=partial(resnet, 18),
    resnet34=partial(resnet, 34),
    resnet50=partial(resnet, 50),
    resnet101=partial(resnet, 101),
    resnet152=partial(resnet, 152),
    mobilenet_v3=mobilenet_v3,
    shufflenet_v2=shufflenet_v2,
    densenet121=partial(densenet, 121),
    squeezenet=squeezenet,
    inception_v3=inception_v3,
    lstm=lstm,
    ncf=ncf,
    bert_small=partial(bert, dim=512, layers=4, heads=8),
    bert_base=bert,
    transformer=transformer,
    deepspeech=deepspeech,
    gcn=gcn,
    fastgcn=fastgcn,
    graphsage=graphsage,
    yolo=yolo,
)
