"""Synthetic data in the shapes that the models take: learnable, and the same everywhere."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from carpool.runtime.data.datasets import Split, TensorData, synthetic
from zoo.graphs import Graph, NodeData

Data = TensorData | NodeData


class Halves(NamedTuple):
    """Data to train on and data to judge by, of any kind."""

    train: Data
    test: Data


def images(size: int, seed: int, *, classes: int = 10, image: int = 32, channels: int = 3) -> Halves:
    """Noisy pictures around one centre per class, and the class."""
    split: Split = synthetic((channels, image, image), classes, size, seed=seed)
    return Halves(split.train, split.test)


def sentences(size: int, seed: int, *, tokens: int = 10_000, length: int = 35) -> Halves:
    """Token numbers in which each mostly follows from the one before, and the same moved by one."""
    dice = _dice(seed)
    total = size + _tests(size)
    rows = [torch.randint(tokens, (total,), generator=dice)]
    for _ in range(length):
        other = torch.randint(tokens, (total,), generator=dice)
        keeps = torch.rand(total, generator=dice) < 0.9
        rows.append(torch.where(keeps, (rows[-1] * 31 + 7) % tokens, other))
    text = torch.stack(rows, dim=1)
    return _halves(size, text[:, :-1].contiguous(), text[:, 1:].contiguous())


def ratings(size: int, seed: int, *, users: int = 6040, items: int = 3706) -> Halves:
    """Pairs of a user and an item, and whether the user likes it: as hidden tastes in four dimensions tell."""
    dice = _dice(seed)
    tastes, traits = torch.randn(users, 4, generator=dice), torch.randn(items, 4, generator=dice)
    total = size + _tests(size)
    who, what = torch.randint(users, (total,), generator=dice), torch.randint(items, (total,), generator=dice)
    return _halves(size, who, what, ((tastes[who] * traits[what]).sum(1) > 1.5).float())


def questions(size: int, seed: int, *, tokens: int = 30_522, length: int = 128) -> Halves:
    """Question and text in one row of tokens (0 is padding), their kinds, and where the answer begins and ends.

    The question's last token stands in the text just before the answer, which is two tokens long.
    """
    dice = _dice(seed)
    total, asked = size + _tests(size), length // 4
    words = torch.randint(3, tokens, (total, length), generator=dice)
    words[:, 0], words[:, asked] = 1, 2
    begin = torch.randint(asked + 2, length - 2, (total,), generator=dice)
    rows = torch.arange(total)
    words[rows, begin - 1] = words[:, asked - 1]
    kinds = (torch.arange(length) > asked).long().expand(total, -1).contiguous()
    return _halves(size, words, kinds, begin, begin + 1)


def translations(size: int, seed: int, *, tokens: int = 37_000, length: int = 32) -> Halves:
    """A sentence of varied length (0 fills up) and its translation, another word for each; a 1 begins it."""
    dice = _dice(seed)
    total = size + _tests(size)
    words = torch.randint(2, tokens, (total, length), generator=dice)
    lengths = torch.randint(max(1, length // 2), length + 1, (total, 1), generator=dice)
    source = torch.where(torch.arange(length) < lengths, words, 0)
    said = torch.where(source > 0, 2 + (source * 17) % (tokens - 2), 0)
    begun = torch.cat((torch.ones(total, 1, dtype=torch.long), said[:, :-1]), dim=1)
    return _halves(size, source, begun, said)


def speech(size: int, seed: int, *, bins: int = 161, letters: int = 29, frames: int = 200, spoken: int = 20) -> Halves:
    """Spectrograms in which each letter sounds for equally long, the letters, and how many of them count."""
    dice = _dice(seed)
    total = size + _tests(size)
    sounds = torch.randn(letters, bins, generator=dice)
    labels = torch.randint(1, letters, (total, spoken), generator=dice)
    when = torch.arange(frames) * spoken // frames
    clean = sounds[labels[:, when]].transpose(1, 2)
    noise = torch.randn(total, bins, frames, generator=dice)
    lengths = torch.full((total,), spoken)
    return _halves(size, (clean + 0.5 * noise).unsqueeze(1), labels, lengths)


def nodes(
    size: int, seed: int, *, nodes: int = 2708, features: int = 1433, classes: int = 7, degree: int = 4
) -> Halves:
    """A graph whose nodes mostly link to their class and share some of its words; ``size`` nodes are for training."""
    dice = _dice(seed)
    labels = torch.randint(classes, (nodes,), generator=dice)
    typical = (torch.rand(classes, features, generator=dice) < 0.03).float()
    common = torch.rand(nodes, features, generator=dice) < 0.012
    own = (torch.rand(nodes, features, generator=dice) < 0.2) & (typical[labels] > 0)
    words = (common | own).float()
    words /= words.sum(1, keepdim=True).clamp(min=1.0)
    sides = torch.randint(nodes, (2, nodes * degree), generator=dice)
    alike = labels[sides[0]] == labels[sides[1]]
    edges = sides[:, alike | (torch.rand(nodes * degree, generator=dice) < 0.05)]
    graph = Graph.of(words, edges)
    size = min(size, nodes - 1)
    return Halves(
        NodeData(graph, torch.arange(size), labels), NodeData(graph, torch.arange(size, min(nodes, 2 * size)), labels)
    )


def scenes(size: int, seed: int, *, classes: int = 80, image: int = 256, channels: int = 3, objects: int = 8) -> Halves:
    """Pictures with some rectangles, the class told by the colour, and their boxes as `boxes` reads them."""
    dice = _dice(seed)
    total = size + _tests(size)
    colours = torch.rand(classes, channels, generator=dice) * 2.0 - 1.0
    kinds = torch.randint(classes, (total, objects), generator=dice)
    middle = 0.2 + 0.6 * torch.rand(total, objects, 2, generator=dice)
    sides = 0.1 + 0.25 * torch.rand(total, objects, 2, generator=dice)
    there = torch.rand(total, objects, generator=dice) < 0.5
    pictures = 0.1 * torch.randn(total, channels, image, image, generator=dice)
    axis = (torch.arange(image) + 0.5) / image
    for place in range(objects):
        across, down = (
            (axis - middle[:, place, side, None]).abs() < sides[:, place, side, None] / 2 for side in (0, 1)
        )
        inside = (down[:, :, None] & across[:, None, :] & there[:, place, None, None])[:, None]
        pictures = torch.where(inside, colours[kinds[:, place]][:, :, None, None], pictures)
    shown = torch.where(there, kinds, -1).unsqueeze(-1)
    return _halves(size, pictures, torch.cat((shown.float(), middle, sides), dim=-1))


def _dice(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _tests(size: int) -> int:
    return max(1, size // 5)


def _halves(size: int, *tensors: Tensor) -> Halves:
    return Halves(TensorData(*[t[:size] for t in tensors]), TensorData(*[t[size:] for t in tensors]))
