"""Trainings from torchvision, transformers (random weights) and own modules, sized for a GPU: no line of carpool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from parts import GPT, Parts, Tagger, classify, gan
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everybody writes it
from torch.utils.data import Dataset, TensorDataset, random_split


def _images(samples: int, size: int = 32, classes: int = 10) -> TensorDataset:
    return TensorDataset(torch.randn(samples, 3, size, size), torch.randint(0, classes, (samples,)))


def vision(name: str, batch: int = 128, size: int = 32, adam: bool = False) -> Parts:
    """A torchvision model."""
    import torchvision

    more = {"image_size": size} if name.startswith("vit") else {}
    model = torchvision.models.get_model(name, weights=None, num_classes=10, **more)
    optimizer = (
        torch.optim.Adam(model.parameters(), lr=1e-3)
        if adam
        else torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    )
    data, _ = random_split(_images(10 * batch, size), [8 * batch, 2 * batch])
    return Parts(model, data, batch, optimizer, classify)


class Tokens(Dataset[Any]):
    """Samples as dicts, as tokenizers give them."""

    def __init__(self, samples: int, length: int, vocabulary: int, classes: int = 0) -> None:
        self.tokens = torch.randint(0, vocabulary, (samples, length))
        self.labels = torch.randint(0, classes, (samples,)) if classes else self.tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        tokens = self.tokens[place]
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": self.labels[place]}


def own_loss(model: Any, batch: Any) -> Tensor:
    """The loss that a model of transformers computes itself."""
    loss: Tensor = model(**batch).loss
    return loss


def hf_gpt2() -> Parts:
    """GPT-2 with six layers, AdamW."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=4096, n_positions=128, n_embd=256, n_layer=6, n_head=8))
    return Parts(model, Tokens(2048, 128, 4096), 16, torch.optim.AdamW(model.parameters(), lr=3e-4), own_loss)


def hf_bert() -> Parts:
    """BERT for classification with four layers, AdamW."""
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
    model = BertForSequenceClassification(BertConfig(vocab_size=4096, num_labels=4, **sizes))
    return Parts(model, Tokens(2048, 64, 4096, 4), 32, torch.optim.AdamW(model.parameters(), lr=5e-5), own_loss)


def own_gpt() -> Parts:
    """An own GPT with a mask of -inf in a buffer."""
    model = GPT(vocabulary=256, width=256, length=128, layers=6)
    data = TensorDataset(torch.randint(0, 256, (2048, 129)))

    def loss(net: Any, batch: Any) -> Tensor:
        tokens = batch[0]
        return F.cross_entropy(net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    return Parts(model, data, 32, torch.optim.AdamW(model.parameters(), lr=3e-4), loss)


def own_lstm() -> Parts:
    """An own LSTM."""
    model, data = Tagger(), TensorDataset(torch.randn(8192, 40, 32), torch.randint(0, 5, (8192,)))
    return Parts(model, data, 128, torch.optim.Adam(model.parameters(), lr=1e-3), classify)


class Autoencoder(nn.Module):
    """Convolutions down and up again, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 64, 3, 2, 1), nn.ReLU(), nn.Conv2d(64, 128, 3, 2, 1), nn.ReLU())
        self.up = nn.Sequential(nn.ConvTranspose2d(128, 64, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(64, 3, 4, 2, 1))
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.up(self.drop(self.down(x)))
        return out


def autoencoder() -> Parts:
    """An own autoencoder with RMSprop."""
    model = Autoencoder()

    def loss(net: Any, batch: Any) -> Tensor:
        return F.mse_loss(net(batch[0]), batch[0])

    return Parts(model, _images(4096), 64, torch.optim.RMSprop(model.parameters(), lr=1e-3), loss)


ALL: dict[str, Callable[[], Parts]] = {
    **{
        name.replace("_", "-"): (lambda name=name: vision(name))
        for name in ("resnet18", "mobilenet_v3_small", "shufflenet_v2_x1_0", "squeezenet1_1")
    },
    "efficientnet-b0": lambda: vision("efficientnet_b0", adam=True),
    "resnet50": lambda: vision("resnet50", 64, 64),
    "densenet121": lambda: vision("densenet121", 64),
    "vgg16-large": lambda: vision("vgg16", 256, 128),
    "resnet50-large": lambda: vision("resnet50", 256, 128),
    "hf-gpt2": hf_gpt2,
    "hf-bert": hf_bert,
    "own-gpt": own_gpt,
    "own-lstm": own_lstm,
    "autoencoder": autoencoder,
    "gan-gpu": gan,
}
