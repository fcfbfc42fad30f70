"""Initial weights of large layers, drawn by all cores of the process and yet always the same.

One core draws some 200 million numbers in a second, and touches their memory for the first time meanwhile: for the head
of a VGG that is most of a warm start. So a large tensor is drawn in chunks, each with a generator of its own. Their
seeds come from torch's generator, so that the whole still follows from the job's seed, whoever draws which chunk.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

_CHUNK = 1 << 22  # elements; it decides what is drawn, so it never changes
_LARGE = 2 * _CHUNK


def draw_normal(tensor: Tensor, std: float) -> None:
    """Fill a tensor with normal numbers around 0."""
    if tensor.numel() < _LARGE or tensor.device.type != "cpu" or not tensor.is_contiguous():
        nn.init.normal_(tensor, 0.0, std)
        return
    flat = tensor.detach().view(-1)  # detached, because a thread does not know that no gradient is wanted
    chunks = [flat[start : start + _CHUNK] for start in range(0, len(flat), _CHUNK)]
    seeds = torch.randint(1 << 62, (len(chunks),)).tolist()

    def draw(chunk: Tensor, seed: int) -> None:
        chunk.normal_(0.0, std, generator=torch.Generator().manual_seed(seed))

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        list(threads.map(draw, chunks, seeds))
