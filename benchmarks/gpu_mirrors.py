"""Measures what a mirror costs a training on a GPU, written by the worker itself and asynchronously.

Usage: PYTHONPATH=src python benchmarks/gpu_mirrors.py [--device cuda] [--models vgg16,resnet18,mobilenet_v3]

For each model (batch 128, CUDA graphs): milliseconds by which a window of steps grows with a mirror in its middle, both
ways; and whether a training that continues from the asynchronous mirror ends with the same weights.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import replace
from typing import Any

import torch
from measured import save
from zoo_trainings import training

from carpool.runtime.engine.trainer import Trainer
from carpool.runtime.memory.swap_client import SwapClient
from carpool.runtime.process.protocol import Message
from carpool.runtime.process.shared_memory import new_memory_file
from carpool.runtime.state.digest import digest
from carpool.runtime.state.mirror import MirrorWriter, read_mirror, write_mirror
from carpool.runtime.state.tensor_file import StateParts


def made(model: str, device: str, batch: int) -> Trainer:
    """A training that does not end."""
    whole = training(model, batch, steps=1_000_000, seed=0, channels_last=True)
    return Trainer(replace(whole, precision="tf32"), device=device)


def window_s(trainer: Trainer, steps: int, publish: Any = None) -> float:
    """Seconds for some steps, with a mirror in their middle."""
    trainer.synchronize()
    began = time.perf_counter()
    for number in range(steps):
        if publish is not None and number == steps // 2:
            publish()
        trainer.step()
    trainer.synchronize()
    return time.perf_counter() - began


def measure(trainer: Trainer, other: Trainer, steps: int) -> dict[str, Any]:
    """One training, and another of the same that goes on from a mirror."""
    fd, said = new_memory_file("mirror"), list[Message]()
    aside = MirrorWriter(trainer, SwapClient(None, said.append), said.append, in_thread=True)
    for _ in range(8):
        trainer.step()
    write_mirror(
        fd, 0, StateParts.of(trainer.state_dict())
    )  # pages of the file and of pinned memory are there from now on
    aside.publish(fd)
    aside.finish()
    plain = min(window_s(trainer, steps) for _ in range(3))
    by_itself = min(
        window_s(trainer, steps, lambda: write_mirror(fd, 0, StateParts.of(trainer.state_dict()))) for _ in range(2)
    )
    beside = []
    for _ in range(3):
        beside.append(window_s(trainer, steps, lambda: aside.publish(fd)))
        aside.finish()
    went_on = digest(trainer.training.model)
    step, state = read_mirror(fd)
    other.load_state_dict(state)
    while other.cursor.step < trainer.cursor.step:
        other.step()
    row = {
        "mirror_mb": round(os.fstat(fd).st_size / 1e6, 1),
        "step_ms": round(1e3 * plain / steps, 3),
        "by_itself_ms": round(1e3 * (by_itself - plain), 2),
        "aside_ms": round(1e3 * (min(beside) - plain), 2),
        "replayed": other.cursor.step - step,
        "is_equal": digest(other.training.model) == went_on,
    }
    os.close(fd)
    return row


def main() -> None:
    """Print and keep a row for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--models", default="resnet18,mobilenet_v3,vgg16")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--steps", type=int, default=120)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for model in options.models.split(","):
        first, second = (made(model, options.device, options.batch) for _ in range(2))
        rows.append({"model": model, **measure(first, second, options.steps)})
        print(rows[-1], flush=True)
        save("gpu_mirrors", rows)


if __name__ == "__main__":
    main()
