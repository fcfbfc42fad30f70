"""Trainings of the zoo whose steps stamp their begin and end with the device's clock.

Tiny kernels at the begin of the forward pass and after the update read the GPU's global timer, which all processes
share; inside a graph they are captured with it. On a CPU the monotonic clock serves. A third kernel notes the loss, so
that runs can be compared step by step.
"""

from __future__ import annotations

import math
import struct
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import torch
from zoo_trainings import training

from carpool.runtime.engine.determinism import intra_op_threads
from carpool.runtime.engine.training import Training

T = TypeVar("T")
BEGIN, END = 0, 1
_ONE = {"grid": (1, 1, 1), "block": (1, 1, 1)}
_PAIR = struct.Struct("qd")
_NEVER = 1 << 30  # epochs: an evaluation is made at the end alone
_ROOM = 1 << 16  # stamps kept; later ones overwrite the first
_SOURCE = """
extern "C" __global__ void stamp(unsigned long long* ring, int kind, int room) {
    unsigned long long now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    unsigned long long place = ring[0]++;
    ring[1 + place % room] = now * 2 + kind;
}
extern "C" __global__ void note(unsigned long long* ring, double* losses, float* loss, int room) {
    losses[(ring[0] - 1) % room] = *loss;
}
"""


class Clock:
    """The stamps of one process."""

    def __init__(self) -> None:
        self._ring: torch.Tensor | None = None
        self._losses: torch.Tensor | None = None
        self._stamp: Any = None
        self._note: Any = None
        self._host: list[int] = []
        self._host_losses: list[float] = []

    def stamp(self, kind: int, device: torch.device) -> None:
        """Note the time when the device gets here."""
        if device.type == "cpu":
            self._host.append(time.perf_counter_ns() * 2 + kind)
            self._host_losses.append(math.nan)
            return
        if self._ring is None:
            self._ring = torch.zeros(1 + _ROOM, dtype=torch.int64, device=device)
            self._losses = torch.zeros(_ROOM, dtype=torch.float64, device=device)
            compiled = torch.cuda._compile_kernel  # type: ignore[attr-defined]
            self._stamp, self._note = compiled(_SOURCE, "stamp"), compiled(_SOURCE, "note")
        self._stamp(**_ONE, args=[self._ring, kind, _ROOM])

    def note(self, loss: torch.Tensor) -> None:
        """Keep a loss beside the last stamp."""
        if self._ring is None:
            self._host_losses[-1] = float(loss.detach())
        else:
            self._note(**_ONE, args=[self._ring, self._losses, loss.detach().float(), _ROOM])

    def last(self, count: int) -> list[int]:
        """The newest stamps, oldest first: time in nanoseconds doubled, plus the kind."""
        return self._all()[-count:]

    def _all(self) -> list[int]:
        return self._host if self._ring is None else self._in_order(self._ring[1:].tolist())

    def _all_losses(self) -> list[float]:
        return self._host_losses if self._losses is None else self._in_order(self._losses.tolist())

    def _in_order(self, ring: list[T]) -> list[T]:
        assert self._ring is not None
        count = int(self._ring[0])
        return ring[:count] if count <= _ROOM else ring[count % _ROOM :] + ring[: count % _ROOM]

    def write(self, path: Path) -> None:
        """Write all stamps, oldest first, and the losses beside them, 16 bytes each."""
        pairs = list(zip(self._all(), self._all_losses(), strict=True))
        part = path.with_suffix(".part")
        part.write_bytes(b"".join(_PAIR.pack(*pair) for pair in pairs))
        part.rename(path)


def _whole(path: Path) -> list[tuple[int, int, float]]:
    """The whole steps that a process has noted: begin, end and loss; of one that was made twice, the later begin."""
    pairs = [(each >> 1, each & 1, loss) for each, loss in _PAIR.iter_unpack(path.read_bytes())]
    return [
        (begin, end, loss)
        for (begin, first, loss), (end, second, _) in pairwise(pairs)
        if (first, second) == (BEGIN, END)
    ]


def read(path: Path) -> list[tuple[int, int]]:
    """The whole steps that a process has noted: (begin, end) in nanoseconds."""
    return [(begin, end) for begin, end, _ in _whole(path)]


def read_losses(path: Path) -> list[float]:
    """The losses of these steps."""
    return [loss for _, _, loss in _whole(path)]


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
        made = loss(net, batch)
        clock.note(made[0] if isinstance(made, tuple) else made)  # of a sum and a count, the sum
        return made

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
