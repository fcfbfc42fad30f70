"""Probe entries: wrap a training, run a few of its steps and write measurements to a file.

The wrapped training runs in an ordinary worker under an ordinary executor. It differs from the original only in that it
stops after a few steps, does not evaluate, and reads time and memory after each update.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from carpool.predictors.loss.gradient_noise import NoiseScale
from carpool.runtime.compat.allocator import map_large_blocks
from carpool.runtime.data.nested import nested_tensors
from carpool.runtime.data.sampler import batch_lengths
from carpool.runtime.engine.stop_criteria import Stop
from carpool.runtime.engine.trainer import Trainer
from carpool.runtime.engine.training import Training
from carpool.runtime.memory.memory_usage import MemoryFootprint, limit_memory
from carpool.runtime.profiling.gpu_meter import GpuMeter
from carpool.runtime.profiling.sweep import ProbeConfig
from carpool.runtime.worker.entry_loader import load_training

_MAX_PARTS = 8


def probed_training(entry: str, args: Mapping[str, Any], seed: int, config: Mapping[str, Any]) -> Training:
    """Load the training of an entry and measure some of its steps; ``config`` are the fields of `ProbeConfig`."""
    probe_config = ProbeConfig(**config)
    device = _device(probe_config)
    if probe_config.exact_memory:
        map_large_blocks()
    footprint = MemoryFootprint(device)
    if probe_config.limit_bytes:
        limit_memory(probe_config.limit_bytes, device)
    training = load_training(entry, args, seed=seed)
    return _Probe(probe_config, training, footprint, device).training()


class _Probe:
    """Records the end of every step; measures memory and device use from the first measured step to the last."""

    def __init__(
        self, config: ProbeConfig, training: Training, footprint: MemoryFootprint, device: torch.device
    ) -> None:
        self._config = config
        self._original = training
        self._footprint = footprint
        self._device = device
        self._step_ends: list[float] = []
        self._cpu_s = 0.0
        self._batch_bytes = 0
        self._start_s = 0.0
        self._meter: GpuMeter | None = None

    def training(self) -> Training:
        original, config = self._original, self._config
        by_evaluation = original.schedule_every == "evaluation"
        return replace(
            original,
            loss=None if original.loss is None else self._loss,
            step=None if original.step is None else self._step,
            after_update=self._after_update,
            on_step_end=None,
            on_epoch_end=None,
            stop=Stop(steps=config.warmup + config.steps),
            evaluate=None,
            best="",
            schedule=None if by_evaluation else original.schedule,
            schedule_every="step" if by_evaluation else original.schedule_every,
        )

    def _loss(self, model: nn.Module, batch: Any) -> Any:
        assert self._original.loss is not None
        self._measure_batch(batch)
        return self._original.loss(model, batch)

    def _step(self, model: nn.Module, batch: Any, optimizer: Any) -> Any:
        assert self._original.step is not None
        self._measure_batch(batch)
        return self._original.step(model, batch, optimizer)

    def _measure_batch(self, batch: Any) -> None:
        if not self._batch_bytes:
            self._batch_bytes = sum(tensor.nbytes for tensor in nested_tensors(batch))

    def _after_update(self, model: nn.Module, step: int) -> None:
        if self._original.after_update is not None:
            self._original.after_update(model, step)
        if step == 1:
            self._start_s = process_age_s()
        if step == self._config.warmup:
            self._begin()
        elif self._step_ends:
            self._step_ends.append(time.perf_counter())
            if step >= self._config.warmup + self._config.steps:
                self._end()

    def _begin(self) -> None:
        self._synchronize()
        self._footprint.reset_peak()
        self._meter = GpuMeter.start(self._device)
        self._cpu_s = time.process_time()
        self._step_ends.append(time.perf_counter())

    def _end(self) -> None:
        self._synchronize()
        ended = time.perf_counter()
        cpu_s = time.process_time() - self._cpu_s
        num_steps, seconds = len(self._step_ends) - 1, ended - self._step_ends[0]
        cores = len(os.sched_getaffinity(0))
        use = self._meter.stop() if self._meter is not None else None
        durations = [end - start for start, end in pairwise(self._step_ends)]
        traffic = None if use is None or use.received_bytes_per_s is None else use.received_bytes_per_s * seconds
        measured = {
            "steps": num_steps,
            "step_s": statistics.median(durations) if self._device.type == "cpu" else seconds / num_steps,
            "mean_step_s": seconds / num_steps,
            "step_spread_s": _spread(durations),
            "peak_bytes": self._footprint.peak_bytes(),
            "reserved_bytes": self._footprint.reserved_bytes(),
            "device_use": min(1.0, cpu_s / seconds / cores) if use is None else use.device,
            "bandwidth_use": None if use is None else use.bandwidth,
            "batch_bytes": self._batch_bytes,
            "host_to_device_bytes": None if traffic is None else traffic / num_steps,
            "start_s": self._start_s,
            "training": declared(self._original),
        }
        _write(Path(self._config.out), measured)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def measure_noise(entry: str, args: Mapping[str, Any], seed: int, config: Mapping[str, Any]) -> Training:
    """Measure the gradient noise of an entry's training: split steps into parts and compare their gradients."""
    probe_config = ProbeConfig(**config)
    training = load_training(entry, args, seed=seed)
    parts = num_parts(training)
    measured: dict[str, Any] = {"parts": parts, "scale": None, "spread": None, "steps": 0}
    if parts > 1:
        trainer = Trainer(training, seed=seed, exact=True, shards=parts, device=_device(probe_config))
        scale = NoiseScale()
        for number in range(probe_config.warmup + probe_config.steps):
            sizes, norms, total = _part_norms(trainer)
            if number >= probe_config.warmup and total > 0.0:
                scale.partial_fit(sizes, norms, total)
        estimate = scale.predict()
        if isfinite(estimate.mean):  # infinite if the noise exceeds the gradient
            measured["scale"] = estimate.mean
            measured["spread"] = estimate.std if isfinite(estimate.std) else None
        measured["steps"] = scale.num_steps_
    _write(Path(probe_config.out), measured)
    training = replace(training, evaluate=None, best="", on_step_end=None, on_epoch_end=None)
    return replace(training, stop=Stop(steps=1), schedule=None, schedule_every="step")


def declared(training: Training) -> dict[str, Any]:
    """The fields of a training that its profile contains."""
    return {
        "batch_size": training.batch_size,
        "num_samples": training.num_samples,
        "stop_steps": training.stop.steps,
        "stop_epochs": training.stop.epochs,
    }


def num_parts(training: Training) -> int:
    """The number of parts, a power of two, that leaves every part the two samples that BatchNorm needs."""
    if training.step is not None or training.is_stream:
        return 1
    least = min(batch_lengths(training.num_samples, training.batch_size, 0))
    parts = _MAX_PARTS
    while parts > 1 and 2 * parts > least:
        parts //= 2
    return parts


def _part_norms(trainer: Trainer) -> tuple[list[int], list[float], float]:
    """Run one step; returns the sizes of its parts, their squared gradient norms and that of the whole gradient."""
    step = trainer.next_step()
    contributions, sizes, norms = [], [], []
    for piece, (start, end) in enumerate(step.bounds):
        (made,) = trainer.contribute(step, range(piece, piece + 1))
        contributions.append(made)
        if made[1] is not None:  # already weighted by b_i/B
            sizes.append(end - start)
            norms.append(_squared_norm(trainer, made[1].values) * (step.num_samples / (end - start)) ** 2)
    total = trainer.combine(step, contributions)
    whole = _squared_norm(trainer, total.values)
    trainer.advance(step, trainer.apply(step, total))
    trainer.progress.evaluation_due = False
    return sizes, norms, whole


def _squared_norm(trainer: Trainer, values: Tensor) -> float:
    return sum(float(view.double().square().sum()) for view in trainer.layout.gradient_views(values))


def process_age_s() -> float:
    """Seconds since this process was started."""
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    up_s = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    return up_s - int(fields[19]) / os.sysconf("SC_CLK_TCK")  # proc(5): starttime is field 22


def _device(config: ProbeConfig) -> torch.device:
    """The worker's device: a worker sets its GPU before it calls an entry."""
    return torch.device("cuda", torch.cuda.current_device()) if config.on_gpu else torch.device("cpu")


def _spread(durations: list[float]) -> float:
    """Half the distance between the 16th and 84th percentile: a standard deviation that ignores outliers."""
    if len(durations) < 2:
        return 0.0
    cuts = statistics.quantiles(durations, n=100, method="inclusive")
    return (cuts[83] - cuts[15]) / 2


def _write(folder: Path, measured: Mapping[str, Any]) -> None:
    draft = folder / f".{os.getpid()}.part"
    draft.write_text(json.dumps(measured), encoding="ascii")
    draft.replace(folder / f"{os.getpid()}.json")
