"""Measures how much of a step is waiting for data, for each input path, beside torch's DataLoader.

    python benchmarks/runtime_input.py [--device cuda] [--rounds 9] [--limit-s 150]

Every loop alternates with a copy that computes on one fixed batch: the share of waiting is 1 − (step of the copy) /
(step with input), median over rounds; below zero means no difference. Data: images as bytes in memory (converted per
batch), and the same with a slow transform per sample (about 0.2 ms of NumPy), read sample by sample. Computing uses
one CPU core; readers and loader workers run elsewhere. With --device cuda, ``ahead`` is the path for data that does
not fit on the device.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from measured import Patience, save
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import carpool
from carpool.runtime.compat.allocator import keep_freed_memory
from carpool.runtime.data.batches import BatchSource, InputMode, InputPlan
from carpool.runtime.data.datasets import TensorData, scaled_images
from carpool.runtime.engine.trainer import Trainer

GUARD_S = 170.0  # after which everything is ended
SPELL_S = 0.3  # how long each loop computes in a round
FINISH = scaled_images((0.5, 0.5, 0.5), (0.25, 0.25, 0.25))


class Slow:
    """Pictures read one by one, each with some work."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self._images = images.numpy()
        self._labels = labels.tolist()

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, sample: int) -> tuple[Tensor, int]:
        pixels = self._images[sample].astype(np.float32) / 255.0
        for _ in range(8):
            pixels = np.sqrt(pixels * pixels + np.roll(pixels, 1, axis=1) * 1e-3)
        return torch.from_numpy(pixels), self._labels[sample]


class Still:
    """One batch that is always there."""

    def __init__(self, size: int, batch: tuple[Tensor, ...]) -> None:
        self._size = size
        self._batch = batch

    def __len__(self) -> int:
        return self._size

    def batch(self, samples: Tensor) -> tuple[Tensor, ...]:
        """The batch."""
        return self._batch


@dataclass(frozen=True, slots=True)
class Setting:
    """What is trained, and on what."""

    device: torch.device
    images: Tensor
    labels: Tensor
    width: int
    batch_size: int

    def training(self, dataset: Any, **more: Any) -> carpool.Training:
        """Endless, with this dataset."""
        torch.manual_seed(0)
        layers: list[nn.Module] = [nn.Conv2d(3, self.width, 3, padding=1), nn.ReLU()]
        layers += [nn.Conv2d(self.width, self.width, 3, stride=2), nn.ReLU(), nn.Flatten()]
        side = (self.images.shape[-1] - 3) // 2 + 1
        model = nn.Sequential(*layers, nn.Linear(self.width * side * side, 10))
        return carpool.Training(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
            dataset=dataset,
            loss=lambda model, batch: cross_entropy(model(batch[0]), batch[1]),
            batch_size=self.batch_size,
            stop=carpool.Stop(steps=10**9),
            **more,
        )

    @property
    def first(self) -> tuple[Tensor, ...]:
        """The batch of the twins, on the device."""
        rows = FINISH((self.images[: self.batch_size], self.labels[: self.batch_size]))
        return tuple(tensor.to(self.device) for tensor in rows)


def by_carpool(setting: Setting, dataset: Any, choice: InputPlan | None = None, **more: Any) -> Iterator[None]:
    """Steps of a trainer."""
    trainer = Trainer(setting.training(dataset, **more), device=setting.device)
    if choice is not None:
        trainer._passes.batches = BatchSource(dataset, seed=0, device=setting.device, plan=choice)
    with trainer.nondeterministic_ops.collect():
        for _ in trainer.steps():
            yield


def by_loader(setting: Setting, dataset: Any, workers: int) -> Iterator[None]:
    """Steps of a bare loop over a DataLoader."""
    gpu = setting.device.type == "cuda"
    loader: DataLoader[Any] = DataLoader(
        dataset, setting.batch_size, shuffle=True, num_workers=workers, pin_memory=gpu, persistent_workers=workers > 0
    )
    return bare(setting, (batch for _ in iter(int, 1) for batch in loader))


def bare(setting: Setting, batches: Iterator[Any]) -> Iterator[None]:
    """Steps of a bare loop."""
    training = setting.training(Still(setting.batch_size, ()))
    model, optimizer = training.model.to(setting.device), training.optimizer
    for inputs, labels in batches:
        inputs, labels = (part.to(setting.device, non_blocking=True) for part in (inputs, labels))
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        yield


def step_s(loop: Iterator[None], steps: int, device: torch.device) -> float:
    """Seconds for each of some steps."""
    began = time.perf_counter()
    for _ in range(steps):
        next(loop)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / steps


def waiting(setting: Setting, loop: Iterator[None], twin: Iterator[None], rounds: int) -> dict[str, float]:
    """What a loop waits for its data."""
    for each in (loop, twin):
        step_s(each, 5, setting.device)
    steps = max(3, round(SPELL_S / step_s(twin, 3, setting.device)))
    pairs = [(step_s(loop, steps, setting.device), step_s(twin, steps, setting.device)) for _ in range(rounds)]
    return {
        "step_ms": round(statistics.median(took for took, _ in pairs) * 1e3, 2),
        "still_ms": round(statistics.median(still for _, still in pairs) * 1e3, 2),
        "waiting": round(statistics.median(1 - still / took for took, still in pairs), 3),
    }


def cases(setting: Setting) -> Iterator[tuple[str, str, Callable[[], Iterator[None]]]]:
    """Data, way and loop."""
    rows = TensorData(setting.images, setting.labels, finish=FINISH)
    slow = Slow(setting.images, setting.labels)
    gpu = setting.device.type == "cuda"
    yield "in memory", "carpool", lambda: by_carpool(setting, rows)
    if gpu:
        ahead = InputPlan(InputMode.PREFETCH, "for comparison")
        yield "in memory", "carpool, ahead", lambda: by_carpool(setting, rows, ahead)
        yield (
            "in memory",
            "carpool, plain",
            lambda: by_carpool(setting, rows, InputPlan(InputMode.HOST, "for comparison")),
        )
    for workers in (0, 2):
        yield "in memory", f"DataLoader, {workers} workers", lambda workers=workers: by_loader(setting, rows, workers)
    for workers in (0, 1, 2, 4) if gpu else (0, 1, 2):
        named = f"carpool, {workers} workers"
        yield "slow transform", named, lambda workers=workers: by_carpool(setting, slow, workers=workers)
        named = f"DataLoader, {workers} workers"
        yield "slow transform", named, lambda workers=workers: by_loader(setting, slow, workers)


def main() -> int:
    """Measure, print, write the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--limit-s", type=float, default=150.0, help="begin no case after so many seconds")
    options = parser.parse_args()
    guard = threading.Timer(GUARD_S, lambda: os._exit(3))
    guard.daemon = True
    guard.start()
    torch.set_num_threads(1)
    keep_freed_memory()
    gpu = options.device == "cuda"
    chance = torch.Generator().manual_seed(0)
    size, side = (8192, 64) if gpu else (2048, 32)
    images = torch.randint(0, 256, (size, 3, side, side), generator=chance, dtype=torch.uint8)
    labels = torch.randint(0, 10, (size,), generator=chance)
    setting = Setting(torch.device(options.device), images, labels, 128 if gpu else 16, 256 if gpu else 64)
    results = []
    patience = Patience(options.limit_s)
    print(f"{'data':16} {'way':24} {'step':>10} {'still':>10}  waiting", flush=True)
    for data, way, make in cases(setting):
        if patience.is_over:
            break
        still = setting.first
        loop = make()
        twin = (
            by_carpool(setting, Still(size, still))
            if way.startswith("carpool")
            else bare(setting, iter(lambda still=still: still, None))
        )
        row = {"data": data, "way": way, **waiting(setting, loop, twin, options.rounds)}
        results.append(row)
        save(f"runtime_input{'_gpu' if gpu else ''}", results)
        print(
            f"{data:16} {way:24} {row['step_ms']:7.2f} ms {row['still_ms']:7.2f} ms  {row['waiting']:7.1%}", flush=True
        )
        del loop, twin
    return 0


if __name__ == "__main__":
    sys.exit(main())
