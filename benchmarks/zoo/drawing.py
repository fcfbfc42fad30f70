"""Initial weights of large models, drawn on all cores with a result that depends on the seed alone.

One core draws some 200 million numbers in a second, and touches their memory for the first time meanwhile: for the head
of a VGG, or a BERT, that is most of a warm start. So weights are drawn in chunks, each with a generator of its own.
Their seeds come from torch's generator, so that the whole still follows from the job's seed, whoever draws which chunk.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

_CHUNK = 1 << 22  # elements; it decides what is drawn, so it never changes
_LARGE = 2 * _CHUNK
Fill = Callable[[Tensor, torch.Generator | None], object]  # draws numbers in place


def normal(std: float) -> Fill:
    """Normal numbers around 0."""
    return lambda tensor, chance: tensor.normal_(0.0, std, generator=chance)


def xavier(weight: Tensor) -> Fill:
    """Uniform numbers for a linear layer's weight (Glorot and Bengio 2010): up to √(6 / (inputs + outputs))."""
    bound = (6.0 / sum(weight.shape)) ** 0.5
    return lambda tensor, chance: tensor.uniform_(-bound, bound, generator=chance)


def draw_normal(tensor: Tensor, std: float) -> None:
    """Fill a tensor with normal numbers around 0; a small one as torch does."""
    if tensor.numel() < _LARGE:
        nn.init.normal_(tensor, 0.0, std)
    else:
        draw([(tensor, normal(std))])


def draw(wanted: Iterable[tuple[Tensor, Fill]]) -> None:
    """Fill tensors, all at the same time."""
    pieces = [(chunk, fill) for tensor, fill in wanted for chunk in _chunks(tensor.detach())]
    seeds = torch.randint(1 << 62, (len(pieces),), device="cpu").tolist()

    def work(piece: tuple[Tensor, Fill], seed: int) -> None:
        chunk, fill = piece
        fill(chunk, torch.Generator().manual_seed(seed) if chunk.device.type == "cpu" else None)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        list(threads.map(work, pieces, seeds))


def _chunks(tensor: Tensor) -> list[Tensor]:
    flat = tensor.view(-1)
    return [flat[start : start + _CHUNK] for start in range(0, len(flat), _CHUNK)]
