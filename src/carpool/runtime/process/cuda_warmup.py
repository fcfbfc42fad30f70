"""CUDA warm-up: initializes the context and loads common kernels before a process has a job.

On a GPU that is most of a start: the CUDA context, the libraries behind matrix products, convolutions and attention,
and kernels, which are loaded on first use. So one step of a few tiny trainings is made and thrown away. Only the
context stays, and no memory of torch's allocator.
"""

from __future__ import annotations

import gc
import math
import os
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from carpool.jobs.nvml import Nvml
from carpool.runtime.compat.process_lifetime import set_process_name
from carpool.runtime.compat.torch_api import release_cublas_workspaces
from carpool.runtime.data.datasets import TensorData
from carpool.runtime.engine.determinism import enable_determinism
from carpool.runtime.engine.stop_criteria import Stop
from carpool.runtime.engine.trainer import Trainer
from carpool.runtime.engine.training import Training
from carpool.runtime.errors import LeaveRequested
from carpool.runtime.process.channel import Channel, Heartbeat, Received
from carpool.runtime.process.protocol import Leave, Prewarm, Prewarmed
from carpool.runtime.state.digest import fingerprint
from carpool.runtime.worker.error_classifier import failure_message, is_process_lost

_TOKENS, _LENGTH, _WIDTH = 256, 16, 64


def wait_for_job(channel: Channel, warm: Prewarm) -> Received:
    """Warm up, report it and wait for a job's `Begin`."""
    Heartbeat(channel, warm.heartbeat_s).start()
    set_process_name("carpool-warm")
    if warm.cores:
        os.sched_setaffinity(0, warm.cores)
    os.environ.update(warm.environment)
    began = time.perf_counter()
    device = torch.device(warm.device)
    try:
        skipped = warm_up(device)
    except Exception as error:
        channel.send(failure_message(error, 0))
        raise LeaveRequested from error
    channel.send(Prewarmed(time.perf_counter() - began, _held_bytes(device), tuple(skipped)))
    received = channel.receive()
    assert received is not None, "without a timeout there is a message or an end"
    if isinstance(received.message, Leave):
        raise LeaveRequested
    return received


def warm_up(device: torch.device) -> list[str]:
    """Run operations that trainings commonly use. Returns those that failed and why: a job may not need them."""
    enable_determinism()  # before CUDA starts
    torch.zeros(1, device=device).add_(1).item()  # must not fail
    skipped = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, run in _TRAININGS.items():
            try:
                run(device)
            except Exception as error:
                if is_process_lost(error):
                    raise
                skipped.append(f"{name}: {type(error).__name__}: {error}"[:200])
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        release_cublas_workspaces()  # else the allocator keeps them
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return skipped


def _run_one_step(training: Training, device: torch.device) -> None:
    trainer = Trainer(training, device=device, graph=False)
    for _ in trainer.steps():
        pass
    fingerprint(training.model)


def _held_bytes(device: torch.device) -> int:
    """GPU memory of this process."""
    nvml = Nvml.open() if device.type == "cuda" else None
    if nvml is None:
        return 0
    rows = [
        row
        for index in range(nvml.count())
        for row in (*(nvml.processes(index) or ()), *(nvml.mps_processes(index) or ()))
    ]
    return max((row.memory_bytes for row in rows if row.pid == os.getpid()), default=0)


def _batch(device: torch.device) -> int:
    """A common size on a GPU, because libraries choose kernels by size."""
    return 128 if device.type == "cuda" else 4


def _class_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Any:
    return cross_entropy(model(batch[0]), batch[1].flatten())


def _conv(inputs: int, outputs: int, size: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    return [
        nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    ]


def _images(batch: int, *, channels_last: bool = False) -> Training:
    """Common convolutions on images of CIFAR's size."""
    model = nn.Sequential(
        *[*_conv(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)],
        *[*_conv(64, 128, 3), *_conv(128, 128, 3, 2), *_conv(128, 128, 3, groups=128), *_conv(128, 256, 1)],
        *[nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(256, 10)],
    )
    if channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return Training(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        dataset=TensorData(torch.zeros(batch, 3, 32, 32), torch.zeros(batch, dtype=torch.int64)),
        loss=_class_loss,
        batch_size=batch,
        stop=Stop(steps=1),
    )


class _Attention(nn.Module):
    """A transformer block that predicts the next token, with torch's fused attention or an explicit one."""

    def __init__(self, *, is_fused: bool) -> None:
        super().__init__()
        self.is_fused = is_fused
        self.embedding = nn.Embedding(_TOKENS, _WIDTH)
        self.norm = nn.LayerNorm(_WIDTH)
        self.mix = nn.Linear(_WIDTH, 3 * _WIDTH)
        self.body = nn.Sequential(
            nn.Linear(_WIDTH, 4 * _WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * _WIDTH, _TOKENS)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        mixed = self.mix(self.norm(self.embedding(tokens))).unflatten(-1, (3, 4, _WIDTH // 4)).permute(2, 0, 3, 1, 4)
        if self.is_fused:
            mixed_values = scaled_dot_product_attention(mixed[0], mixed[1], mixed[2], is_causal=True)
        else:
            places = torch.arange(tokens.shape[1], device=tokens.device)
            scores = mixed[0] @ mixed[1].transpose(-1, -2) / math.sqrt(_WIDTH // 4)
            scores = scores.masked_fill(places[None, :] > places[:, None], torch.finfo(scores.dtype).min)
            mixed_values = self.body[2](scores.softmax(-1)) @ mixed[2]
        logits: Tensor = self.body(mixed_values.transpose(1, 2).flatten(-2)).flatten(0, 1)
        return logits


def _padded_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Any:
    tokens = batch[1].flatten()
    total = cross_entropy(model(batch[0]), tokens, ignore_index=0, reduction="sum", label_smoothing=0.1)
    return total, (tokens != 0).sum()


def _text(batch: int, *, is_fused: bool) -> Training:
    model = _Attention(is_fused=is_fused)
    tokens = torch.ones(batch, _LENGTH, dtype=torch.int64)
    adam = torch.optim.AdamW if is_fused else torch.optim.Adam
    return Training(
        model=model,
        optimizer=adam(model.parameters(), lr=0.001),
        dataset=TensorData(tokens, tokens),
        loss=_class_loss if is_fused else _padded_loss,
        batch_size=batch,
        stop=Stop(steps=1),
        clip_norm=1.0 if is_fused else None,
    )


# By the name under which a failure is reported.
_TRAININGS: dict[str, Callable[[torch.device], object]] = {
    "images": lambda device: _run_one_step(_images(_batch(device)), device),
    "images, channels last": lambda device: _run_one_step(_images(_batch(device), channels_last=True), device),
    "text": lambda device: _run_one_step(_text(_batch(device), is_fused=True), device),
    "text, explicit attention": lambda device: _run_one_step(_text(_batch(device), is_fused=False), device),
}
