"""Probe entries: wrap a training, run a few of its steps and write measurements to a file.

The wrapped training runs in an ordinary worker under an ordinary executor, so that what is measured is what will run.
It differs from the original in three ways: it stops after a few steps, it does not evaluate, and it looks at the clock
and at its memory after each update.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Mapping
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from carpool.predictors.loss.gradient_noise import NoiseScale
from carpool.runtime.compat.allocator import map_large_blocks
from carpool.runtime.data.sampler import batch_lengths
from carpool.runtime.engine.stop_criteria import Stop
from carpool.runtime.engine.trainer import Trainer
from carpool.runtime.engine.training import Training
from carpool.runtime.memory.memory_usage import MemoryFootprint, limit_memory
from carpool.runtime.profiling.gpu_meter import GpuMeter
from carpool.runtime.profiling.sweep import ProbeConfig
from carpool.runtime.worker.entry_loader import load_training

_MOST_PARTS = 8


def watched(entry: str, args: Mapping[str, Any], seed: int, how: Mapping[str, Any]) -> Training:
    """The training of an entry, watched for some steps as `how` (the fields of `ProbeConfig`) says."""
    watching = ProbeConfig(**how)
    device = _device(watching)
    if watching.counts_blocks:
        map_large_blocks()
    footprint = MemoryFootprint(device)
    if watching.limit_bytes:
        limit_memory(watching.limit_bytes, device)
    training = load_training(entry, args, seed=seed)
    return _Watch(watching, training, footprint, device).training()


class _Watch:
    """Notes the end of every step, and between the first and the last that count all that can be counted."""

    def __init__(
        self, watching: ProbeConfig, training: Training, footprint: MemoryFootprint, device: torch.device
    ) -> None:
        self._watching = watching
        self._original = training
        self._footprint = footprint
        self._device = device
        self._stamps: list[float] = []
        self._cpu_s = 0.0
        self._batch_bytes = 0
        self._start_s = 0.0
        self._meter: GpuMeter | None = None

    def training(self) -> Training:
        """The training with the watch on it."""
        original, watching = self._original, self._watching
        by_evaluation = original.schedule_every == "evaluation"
        return replace(
            original,
            loss=self._loss,
            after_update=self._after_update,
            stop=Stop(steps=watching.warmup + watching.steps),
            evaluate=None,
            best="",
            schedule=None if by_evaluation else original.schedule,
            schedule_every="step" if by_evaluation else original.schedule_every,
        )

    def _loss(self, model: nn.Module, batch: Any) -> Any:
        if not self._batch_bytes:
            self._batch_bytes = tensor_bytes(batch)
        return self._original.loss(model, batch)

    def _after_update(self, model: nn.Module, step: int) -> None:
        if self._original.after_update is not None:
            self._original.after_update(model, step)
        if step == 1:
            self._start_s = process_age_s()
        if step == self._watching.warmup:
            self._begin()
        elif self._stamps:
            self._stamps.append(time.perf_counter())
            if step >= self._watching.warmup + self._watching.steps:
                self._end()

    def _begin(self) -> None:
        self._settle()
        self._footprint.reset_peak()
        self._meter = GpuMeter.start(self._device)
        self._cpu_s = time.process_time()
        self._stamps.append(time.perf_counter())

    def _end(self) -> None:
        self._settle()
        ended = time.perf_counter()
        cpu_s = time.process_time() - self._cpu_s
        num_steps, seconds = len(self._stamps) - 1, ended - self._stamps[0]
        cores = len(os.sched_getaffinity(0))
        use = self._meter.stop() if self._meter is not None else None
        lengths = [later - sooner for sooner, later in zip(self._stamps, self._stamps[1:], strict=False)]
        traffic = None if use is None or use.received_bytes_per_s is None else use.received_bytes_per_s * seconds
        seen = {
            "steps": num_steps,
            "step_s": statistics.median(lengths) if self._device.type == "cpu" else seconds / num_steps,
            "mean_step_s": seconds / num_steps,
            "step_spread_s": _spread(lengths),
            "peak_bytes": self._footprint.peak_bytes(),
            "reserved_bytes": self._footprint.reserved_bytes(),
            "device_use": min(1.0, cpu_s / seconds / cores) if use is None else use.device,
            "bandwidth_use": None if use is None else use.bandwidth,
            "batch_bytes": self._batch_bytes,
            "host_to_device_bytes": None if traffic is None else traffic / num_steps,
            "start_s": self._start_s,
            "training": declared(self._original),
        }
        _write(Path(self._watching.out), seen)

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def noise(entry: str, args: Mapping[str, Any], seed: int, how: Mapping[str, Any]) -> Training:
    """Make steps of an entry's training in small parts, and compare the parts' gradients with the whole one's."""
    watching = ProbeConfig(**how)
    training = load_training(entry, args, seed=seed)
    parts = num_parts(training)
    seen: dict[str, Any] = {"parts": parts, "scale": None, "spread": None, "steps": 0}
    if parts > 1:
        trainer = Trainer(training, seed=seed, exact=True, shards=parts, device=_device(watching))
        scale = NoiseScale()
        for number in range(watching.warmup + watching.steps):
            sizes, norms, total = _part_norms(trainer)
            if number >= watching.warmup and total > 0.0:
                scale.partial_fit(sizes, norms, total)
        found = scale.predict()
        if isfinite(found.mean):  # else the noise drowns the gradient
            seen["scale"] = found.mean
            seen["spread"] = found.std if isfinite(found.std) else None
        seen["steps"] = scale.num_steps_
    _write(Path(watching.out), seen)
    return replace(training, stop=Stop(steps=1), evaluate=None, best="", schedule=None, schedule_every="step")


def declared(training: Training) -> dict[str, Any]:
    """What a profile keeps of the declaration."""
    return {
        "batch_size": training.batch_size,
        "num_samples": training.num_samples,
        "stop_steps": training.stop.steps,
        "stop_epochs": training.stop.epochs,
    }


def num_parts(training: Training) -> int:
    """Into how many parts a batch can be cut so that each has two samples, which BatchNorm needs; a power of two."""
    least = min(batch_lengths(training.num_samples, training.batch_size, 0))
    parts = _MOST_PARTS
    while parts > 1 and 2 * parts > least:
        parts //= 2
    return parts


def _part_norms(trainer: Trainer) -> tuple[list[int], list[float], float]:
    """Make one step; the sizes of its parts, their squared gradient norms and that of the whole gradient."""
    step = trainer.begin()
    gathered, sizes, norms = [], [], []
    for piece, (start, end) in enumerate(step.bounds):
        (made,) = trainer.contribute(step, range(piece, piece + 1))
        gathered.append(made)
        if made[1] is not None:  # it is g_i·b_i/B already
            sizes.append(end - start)
            norms.append(_squared(trainer, made[1].values) * (step.num_samples / (end - start)) ** 2)
    total = trainer.combine(step, gathered)
    whole = _squared(trainer, total.values)
    trainer.advance(step, trainer.apply(step, total))
    trainer.progress.evaluation_due = False  # nobody asks for what it would tell
    return sizes, norms, whole


def _squared(trainer: Trainer, values: Tensor) -> float:
    return sum(float(view.double().square().sum()) for view in trainer.layout.gradient_views(values))


def process_age_s() -> float:
    """Seconds since this process was made."""
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    up_s = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    return up_s - int(fields[19]) / os.sysconf("SC_CLK_TCK")  # proc(5): starttime is the 22nd, 20th behind the name


def tensor_bytes(batch: Any) -> int:
    """Bytes of all tensors in a batch, however they are nested."""
    if isinstance(batch, Tensor):
        return batch.numel() * batch.element_size()
    if isinstance(batch, Mapping):
        return sum(map(tensor_bytes, batch.values()))
    if isinstance(batch, list | tuple):
        return sum(map(tensor_bytes, batch))
    return 0


def _device(watching: ProbeConfig) -> torch.device:
    """Where this worker computes: it has set its GPU before it calls an entry, if it has one."""
    return torch.device("cuda", torch.cuda.current_device()) if watching.on_gpu else torch.device("cpu")


def _spread(lengths: list[float]) -> float:
    """Half the distance between the 16th and the 84th of a hundred: the standard deviation, without the outliers."""
    if len(lengths) < 2:
        return 0.0
    cuts = statistics.quantiles(lengths, n=100, method="inclusive")
    return (cuts[83] - cuts[15]) / 2


def _write(folder: Path, seen: Mapping[str, Any]) -> None:
    draft = folder / f".{os.getpid()}.part"
    draft.write_text(json.dumps(seen), encoding="ascii")
    draft.replace(folder / f"{os.getpid()}.json")
