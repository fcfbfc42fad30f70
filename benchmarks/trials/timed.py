"""Trainings of the zoo whose every step says when it began and when it ended, on the device's own clock.

A tiny kernel at the begin of the forward pass and one behind the update read the GPU's global timer, which is one for
all processes; inside a graph they are recorded with it. On a CPU the system's monotonic clock serves.
"""

from __future__ import annotations

import struct
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from carpool.runtime.seeding import intra_op_threads
from carpool.runtime.training import Training
from carpool.runtime.zoo.trainings import training

BEGIN, END = 0, 1
_NEVER = 1 << 30  # epochs: an evaluation is made at the end alone
_ROOM = 1 << 16  # stamps kept; later ones overwrite the first
_SOURCE = """
extern "C" __global__ void stamp(unsigned long long* ring, int kind, int room) {
    unsigned long long now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    unsigned long long place = ring[0]++;
    ring[1 + place % room] = now * 2 + kind;
}
"""


class Clock:
    """The stamps of one process."""

    def __init__(self) -> None:
        self._ring: torch.Tensor | None = None
        self._kernel: Any = None
        self._host: list[int] = []

    def stamp(self, kind: int, device: torch.device) -> None:
        """Note the time when the device gets here."""
        if device.type == "cpu":
            self._host.append(time.perf_counter_ns() * 2 + kind)
            return
        if self._ring is None:
            self._ring = torch.zeros(1 + _ROOM, dtype=torch.int64, device=device)
            self._kernel = torch.cuda._compile_kernel(_SOURCE, "stamp")  # type: ignore[attr-defined]
        self._kernel(grid=(1, 1, 1), block=(1, 1, 1), args=[self._ring, kind, _ROOM])

    def last(self, count: int) -> list[int]:
        """The newest stamps, oldest first: time in nanoseconds doubled, plus the kind."""
        return self._all()[-count:]

    def _all(self) -> list[int]:
        if self._ring is None:
            return self._host
        count, *ring = self._ring.tolist()
        return ring[:count] if count <= _ROOM else ring[count % _ROOM :] + ring[: count % _ROOM]

    def write(self, path: Path) -> None:
        """Write all stamps, oldest first, 8 bytes each."""
        stamps = self._all()
        part = path.with_suffix(".part")
        part.write_bytes(struct.pack(f"{len(stamps)}q", *stamps))
        part.rename(path)


def read(path: Path) -> list[tuple[int, int]]:
    """The whole steps that a process has noted: (begin, end) in nanoseconds."""
    data = path.read_bytes()
    stamps = [(each >> 1, each & 1) for each in struct.unpack(f"{len(data) // 8}q", data)]
    return [(begin, end) for (begin, first), (end, second) in pairwise(stamps) if (first, second) == (BEGIN, END)]


def arguments(model: str) -> dict[str, Any]:
    """What `stamped` takes for a model of the zoo; ``mlp:8`` has 8 samples in a batch instead of its usual ones."""
    name, _, batch = model.partition(":")
    args: dict[str, Any] = {"model": name, "batch_size": int(batch) if batch else None}
    args["channels_last"] = any(kind in name for kind in ("net", "inception", "vgg"))
    if name.startswith("resnet"):
        args["stem"] = "imagenet"
    return args


def stamped(model: str, steps: int, stamps: str, company: int = 1, **options: Any) -> Training:
    """A training of the zoo with stamps, written to a file when it is over.

    It begins when as many processes as there are in its company are ready to, so that they overlap.
    """
    with intra_op_threads(1):  # made-up data come out the same wherever they are made
        made = training(model, steps=steps, **options)
    if company > 1:
        _gather(Path(stamps), company)
    device = made.model.parameters
    clock, loss = Clock(), made.loss

    def timed(net: torch.nn.Module, batch: Any) -> Any:
        clock.stamp(BEGIN, next(device()).device)
        return loss(net, batch)

    def write(net: torch.nn.Module) -> dict[str, float]:
        clock.write(Path(stamps))
        return {}

    made.optimizer.register_step_post_hook(lambda *_: clock.stamp(END, next(device()).device))
    return replace(made, loss=timed, evaluate=write, evaluate_every=_NEVER)


def _gather(stamps: Path, company: int) -> None:
    if torch.cuda.is_available():
        torch.zeros(1, device="cuda")
    stamps.with_suffix(".here").touch()
    patience = time.monotonic() + 25.0  # one that fails shall not keep the others for long
    while len(list(stamps.parent.glob("*.here"))) < company and time.monotonic() < patience:
        time.sleep(0.01)
