"""Reference loops that a worker is compared with, each in a forked process."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy
from trials.steps import MODELS

import carpool
from carpool.runtime.compat.allocator import keep_freed_memory, with_huge_pages
from carpool.runtime.engine.determinism import enable_determinism
from carpool.runtime.engine.trainer import Trainer

GUARD_S = 600.0  # after which everything is ended
READ_EVERY = 10  # steps after which a good user reads the loss


@dataclass(frozen=True, slots=True)
class Spent:
    """What some steps took."""

    clock_s: float
    core_s: float


def on_core_s(pid: int) -> float:
    """How long all threads of a process have computed so far, those that have ended too."""
    return time.clock_gettime(~pid << 3 | 2)  # what clock_getcpuclockid(3) gives on Linux


class Unborn(Exception):
    """A loop's process has ended."""


Entry = Callable[[], carpool.Training]


def bare_loop(entry: Entry, device: torch.device) -> Iterator[None]:
    """The loop that a good user would write; it stops after every step."""
    training = entry()
    model, optimizer, batch_size = training.model.to(device), training.optimizer, training.batch_size
    images, targets = (tensor.to(device) for tensor in training.dataset.tensors)
    number = 0
    while True:
        order = torch.randperm(training.num_samples, device=device)
        for start in range(0, training.num_samples, batch_size):
            rows = order[start : start + batch_size]
            inputs, labels = images.index_select(0, rows), targets.index_select(0, rows)
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if number % READ_EVERY == 0:
                loss.item()
            number += 1
            yield


def like_loop(entry: Entry, device: torch.device) -> Iterator[None]:
    """The same under carpool's settings, which hold when the training is made, as in a worker."""
    enable_determinism()
    keep_freed_memory()
    return bare_loop(entry, device)


def graphed_loop(entry: Entry, device: torch.device) -> Iterator[None]:
    """The same on a GPU, as a user who knows CUDA graphs writes it: the whole step recorded once, then replayed."""
    enable_determinism()
    training = entry()
    model, optimizer, batch_size = training.model.to(device), training.optimizer, training.batch_size
    images, targets = (tensor.to(device) for tensor in training.dataset.tensors)
    rows = torch.arange(batch_size, device=device)
    for group in optimizer.param_groups:
        if "capturable" in group:
            group["capturable"] = True

    def make() -> torch.Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(model(images.index_select(0, rows)), targets.index_select(0, rows))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            make()
    torch.cuda.current_stream().wait_stream(aside)
    optimizer.zero_grad()
    recording = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recording):
        loss = make()
    for number in itertools.count():
        start = number * batch_size % training.num_samples
        if start == 0:
            order = torch.randperm(training.num_samples, device=device)
        rows.copy_(order[start : start + batch_size])
        recording.replay()
        if number % READ_EVERY == 0:
            loss.item()
        yield


def trainer_loop(entry: Entry, device: torch.device) -> Iterator[None]:
    """Carpool's trainer without a worker around it."""
    keep_freed_memory()
    trainer = Trainer(entry(), device=device)
    with trainer.nondeterministic_ops.collect():
        for _ in trainer.steps():
            yield


LOOPS = {
    "bare": bare_loop,
    "like": like_loop,
    "twin": like_loop,  # once more, in another process: how far two loops that are the same lie apart
    "graphed": graphed_loop,
    "trainer": trainer_loop,
}
_ONLY_ON = {"twin": "cpu", "graphed": "cuda"}


def loops_on(device: str) -> list[str]:
    """Those that are made on a kind of device."""
    return [loop for loop in LOOPS if _ONLY_ON.get(loop, device) == device]


def serve(loop: str, device: torch.device) -> int:
    """In a process of its own: fork one for every training that a line of input names, which makes its steps."""
    torch.set_num_threads(1)
    if loop != "bare":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    print("ready", flush=True)
    while name := sys.stdin.readline().strip():
        pid = os.fork()
        if not pid:
            try:
                make_steps(LOOPS[loop](named(name), device), device)
            except Exception:  # noqa: BLE001 - told, and the others go on without it
                traceback.print_exc()
            os._exit(0)
        os.waitpid(pid, 0)
        print("ended", flush=True)
    return 0


def make_steps(steps: Iterator[None], device: torch.device) -> None:
    """As many as each line of input says, until one says none."""
    next(steps)
    print(os.getpid(), flush=True)
    while count := int(sys.stdin.readline() or "0"):
        for _ in range(count):
            next(steps)
        if device.type == "cuda":
            torch.cuda.synchronize()
        print("made", flush=True)


def named(model: str) -> Entry:
    """A model by name."""
    return next(entry for entries in MODELS.values() for entry in entries if entry.__name__ == model)


class Loop:
    """A process that serves a loop: a script that calls `serve` when told to."""

    def __init__(self, script: str, loop: str, device: str) -> None:
        self._command = [sys.executable, script, "--serve", loop, "--device", device]
        environment = dict(os.environ) if loop == "bare" else with_huge_pages(os.environ)
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._guard = threading.Timer(GUARD_S, self._process.kill)
        self._guard.daemon = True
        self._guard.start()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        self._pid = 0  # of the one that makes steps

    def await_ready(self) -> None:
        """Return when it has started."""
        self._hear()

    def is_born(self) -> bool:
        """Whether the training that was begun makes steps now; false: it has failed."""
        said = self._hear()
        self._pid = int(said) if said.isdecimal() else 0
        return self._pid > 0

    def begin(self, model: str) -> None:
        """Begin a training in a new process, which makes steps once `is_born` has returned true."""
        self._say(model)

    async def make(self, steps: int) -> Spent:
        """Make steps of it."""
        began, on_core = time.perf_counter(), on_core_s(self._pid)
        self._say(steps)
        self._hear()
        return Spent(time.perf_counter() - began, on_core_s(self._pid) - on_core)

    def end(self) -> None:
        """End that process."""
        self._say(0)
        self._hear()

    def _hear(self) -> str:
        if not (said := self._out.readline()):
            raise Unborn(f"{' '.join(self._command)} ended with {self._process.wait()}")
        return said.strip()

    def _say(self, words: str | int) -> None:
        self._in.write(f"{words}\n")
        self._in.flush()

    def close(self) -> None:
        """End it."""
        self._in.close()
        self._process.wait()
        self._guard.cancel()
