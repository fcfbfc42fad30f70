"""What carpool costs a training that runs alone, beside a bare PyTorch loop in the same run; how fast workers start.

    python benchmarks/runtime_overhead.py [--device cuda] [--rounds 21] [--out FILE]

Ways to make the same steps, each in a process of its own that rests meanwhile:

- ``bare``: the loop that a good user writes: data on the device, nothing read back but the loss, and that only now and
  then (the GPU is never made to wait for Python);
- ``like``: the same loop with the settings under which carpool computes: deterministic algorithms, and on CPU the
  allocator told to keep what is freed. What is left between it and a worker are our hooks;
- ``trainer``: a `Trainer` without a worker around it;
- ``worker``: carpool. It makes the steps of a round freely, as it does all its life.

A round is some steps of each in changing order, with one thread on the same core (on CUDA: on one GPU, each round ends
when the device has made all of it). Ratios are taken within rounds, so that what else goes on in the machine matters
less, and their median is reported: by the clock, and on CPU by time on the core as well. Exits with 1 when the worker's
median ratio to ``like`` (on CPU by time on the core) is above 1.02 on a step of 10 ms or more.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from measured import RESULTS, conditions
from torch import nn
from torch.nn.functional import cross_entropy

import carpool
from carpool.runtime.channel import AsyncChannel, Channel, pair
from carpool.runtime.datasets.tensors import TensorData
from carpool.runtime.memory import Mirrors
from carpool.runtime.mirror import read_mirror, write_mirror
from carpool.runtime.nursery import Nursery
from carpool.runtime.prepare import keep_freed_memory
from carpool.runtime.protocol import Alive, Asked, Begin, Grant, Message, Proceed, Publish, Published, Ready, Stepped
from carpool.runtime.seeding import settle
from carpool.runtime.trainer import Trainer

LIMIT, LONG_ENOUGH_S = 1.02, 0.010
GUARD_S = 170.0  # after which everything is ended
SPELL_S = 0.12  # how long each way computes in a round
READ_EVERY = 10  # steps after which a good user reads the loss


def cnn() -> carpool.Training:
    """Much to compute for each parameter."""
    body = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(), nn.Flatten()]
    return declared(nn.Sequential(*body, nn.Linear(32 * 49, 10)), (3, 16, 16), 128)


def mlp(batch_size: int = 128) -> carpool.Training:
    """A million parameters."""
    layers = [nn.Linear(256, 896), nn.ReLU(), nn.Linear(896, 896), nn.ReLU(), nn.Linear(896, 10)]
    return declared(nn.Sequential(*layers), (256,), batch_size)


def declared(
    model: nn.Module,
    shape: tuple[int, ...],
    batch_size: int,
    optimizer: torch.optim.Optimizer | None = None,
    size: int = 2048,
) -> carpool.Training:
    """A training that never ends."""
    data = TensorData(torch.randn(size, *shape), torch.randint(0, 10, (size,)))
    return carpool.Training(
        model=model,
        optimizer=optimizer or torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        dataset=data,
        loss=lambda model, batch: cross_entropy(model(batch[0]), batch[1]),
        batch_size=batch_size,
        stop=carpool.Stop(steps=10**9),
    )


def mlp_short() -> carpool.Training:
    """The same with a step below 10 ms: what does not shrink with the step shows."""
    return mlp(48)


def mlp_long() -> carpool.Training:
    """The same, with more to compute for each update."""
    return mlp(512)


def norm_cnn() -> carpool.Training:
    """Many small parameters and buffers, and Adam."""
    layers: list[nn.Module] = []
    for number in range(12):
        width = 3 if number == 0 else 16
        layers += [nn.Conv2d(width, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 256, 10))
    return declared(model, (3, 16, 16), 32, torch.optim.Adam(model.parameters(), lr=1e-3))


def gpu_mlp(batch_size: int = 24576) -> carpool.Training:
    """Large products: some 10 ms and more on a data-centre GPU."""
    layers = [nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 10)]
    return declared(nn.Sequential(*layers), (1024,), batch_size, size=4 * batch_size)


def gpu_mlp_short() -> carpool.Training:
    """The same with a tenth of the samples."""
    return gpu_mlp(2048)


def gpu_transformer() -> carpool.Training:
    """Six layers, Adam: many kernels for each step."""
    layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.1, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
    model = nn.Sequential(encoder, nn.Flatten(), nn.Linear(512 * 64, 10))
    return declared(model, (64, 512), 192, torch.optim.Adam(model.parameters(), lr=1e-4), size=768)


def gpu_cnn() -> carpool.Training:
    """Convolutions with BatchNorm: what deterministic algorithms cost shows here."""
    layers: list[nn.Module] = []
    for number in range(12):
        width = 3 if number == 0 else 128
        layers += [nn.Conv2d(width, 128, 3, padding=1, bias=False), nn.BatchNorm2d(128), nn.ReLU()]
    model = nn.Sequential(*layers, nn.MaxPool2d(8), nn.Flatten(), nn.Linear(128 * 16, 10))
    return declared(model, (3, 32, 32), 256, size=1024)


MODELS: dict[str, tuple[Callable[[], carpool.Training], ...]] = {
    "cpu": (cnn, norm_cnn, mlp, mlp_short, mlp_long),
    "cuda": (gpu_mlp, gpu_transformer, gpu_cnn, gpu_mlp_short),
}


@dataclass(frozen=True, slots=True)
class Spent:
    """What some steps took."""

    clock_s: float
    core_s: float


def bare_loop(training: carpool.Training, device: torch.device) -> Iterator[None]:
    """The loop that a good user would write; it stops after every step."""
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


def like_loop(training: carpool.Training, device: torch.device) -> Iterator[None]:
    """The same under carpool's settings."""
    settle()
    keep_freed_memory()
    return bare_loop(training, device)


def trainer_loop(training: carpool.Training, device: torch.device) -> Iterator[None]:
    """Carpool's trainer without a worker around it."""
    trainer = Trainer(training, device=device)
    keep_freed_memory()
    with trainer.caveats.watching():
        for _ in trainer.steps():
            yield


LOOPS = {"bare": bare_loop, "like": like_loop, "trainer": trainer_loop}


def serve(loop: str, model: str, device: torch.device) -> int:
    """In a process of its own: make as many steps as each line of input says."""
    torch.set_num_threads(1)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8") if loop != "bare" else None
    steps = LOOPS[loop](named(model)(), device)
    print("ready", flush=True)
    for line in sys.stdin:
        began, on_core = time.perf_counter(), time.process_time()
        for _ in range(int(line)):
            next(steps)
        if device.type == "cuda":
            torch.cuda.synchronize()
        print(time.perf_counter() - began, time.process_time() - on_core, flush=True)
    return 0


def named(model: str) -> Callable[[], carpool.Training]:
    """A model by name."""
    return next(entry for entries in MODELS.values() for entry in entries if entry.__name__ == model)


class Loop:
    """A process that serves a loop."""

    def __init__(self, loop: str, model: str, device: str) -> None:
        command = [sys.executable, __file__, "--serve", loop, model, "--device", device]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._guard = threading.Timer(GUARD_S, self._process.kill)
        self._guard.daemon = True
        self._guard.start()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        if not self._out.readline():
            raise SystemExit(f"{' '.join(command)} ended with {self._process.wait()}")

    async def make(self, steps: int) -> Spent:
        """Make steps."""
        self._in.write(f"{steps}\n")
        self._in.flush()
        return Spent(*map(float, self._out.readline().split()))

    def close(self) -> None:
        """End it."""
        self._in.close()
        self._process.wait()
        self._guard.cancel()


class Worker:
    """A worker process that runs alone; grants only mark where rounds begin and end."""

    def __init__(self, pid: int, channel: AsyncChannel) -> None:
        self.pid = pid
        self.channel = channel

    async def hear(self, kind: type[Message]) -> Message:
        """The next message of a kind."""
        while True:
            message = (await self.channel.receive()).message
            if isinstance(message, kind):
                return message
            assert isinstance(message, Alive | Stepped | Asked), message

    async def make(self, steps: int) -> Spent:
        """Make steps."""
        began, on_core = time.perf_counter(), self._on_core_s()
        self.channel.send(Grant(steps))
        await self.hear(Asked)
        return Spent(time.perf_counter() - began, self._on_core_s() - on_core)

    def _on_core_s(self) -> float:
        threads = Path(f"/proc/{self.pid}/task").iterdir()
        return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


async def forked(nursery: Nursery, entry: str, core: int, device: str = "cpu") -> tuple[Worker, dict[str, float]]:
    """A worker that waits for its first grant, and how long its birth took."""
    ours, theirs = pair()
    began = time.perf_counter()
    with theirs:
        pid = await nursery.fork(theirs)
    born = time.perf_counter()
    worker = Worker(pid, AsyncChannel(ours))
    program = {"entry": f"{Path(__file__).name}:{entry}", "folder": str(Path(__file__).parent)}
    begin = Begin("bench", program, "cpu", cores=(core,)) if device == "cpu" else Begin("bench", program, "cuda:0")
    worker.channel.send(begin)
    await worker.hear(Ready)
    ready = time.perf_counter()
    worker.channel.send(Proceed(1, by_token=True))
    await worker.hear(Asked)
    return worker, {"fork_ms": (born - began) * 1e3, "begin_to_ready_ms": (ready - born) * 1e3}


async def overhead(
    nursery: Nursery, entry: Callable[[], carpool.Training], device: str, rounds: int, core: int
) -> dict[str, Any]:
    """Ratios to the loops without carpool, of the trainer alone and of a worker."""
    name = entry.__name__
    worker, _ = await forked(nursery, name, core, device)
    loops = [Loop(loop, name, device) for loop in LOOPS]
    ways: dict[str, Callable[[int], Awaitable[Spent]]] = {"worker": worker.make}
    ways |= {loop: process.make for loop, process in zip(LOOPS, loops, strict=True)}
    try:
        for make in ways.values():
            await make(5)
        steps = max(2, round(SPELL_S / ((await ways["like"](3)).clock_s / 3)))
        made = []
        for number in range(rounds):
            order = list(ways) if number % 2 else list(ways)[::-1]
            made.append({way: await ways[way](steps) for way in order})
        found = ratios(made, by_core=device == "cpu")
        found["publish_ms"] = await publish_ms(worker)
    finally:
        worker.channel.close()
        for process in loops:
            process.close()
    step_s = statistics.median(spent["like"].clock_s for spent in made) / steps
    judged = found["worker_to_like_core" if device == "cpu" else "worker_to_like_clock"]
    return {
        "model": name,
        "parameters": sum(parameter.numel() for parameter in entry().model.parameters()),
        "step_ms": round(step_s * 1e3, 2),
        **found,
        "within": judged <= LIMIT or step_s < LONG_ENOUGH_S,
    }


SHOWN = ("worker_to_like", "worker_to_bare", "trainer_to_like", "like_to_bare")


def ratios(made: list[dict[str, Spent]], *, by_core: bool) -> dict[str, float]:
    """Median ratios within rounds."""
    found = {}
    for name in SHOWN:
        way, base = name.split("_to_")
        found[f"{name}_clock"] = [spent[way].clock_s / spent[base].clock_s for spent in made]
        if by_core:
            found[f"{name}_core"] = [spent[way].core_s / spent[base].core_s for spent in made]
    return {name: round(statistics.median(values), 4) for name, values in found.items()}


async def publish_ms(worker: Worker) -> float:
    """What a mirror takes, from asking for it to its being there; the second time into each of two memory files."""
    mirrors = Mirrors("bench")
    took = []
    for number in range(6):
        began = time.perf_counter()
        worker.channel.send(Publish(), [mirrors.next])
        await worker.hear(Published)
        took.append(time.perf_counter() - began)
        mirrors.published(number)
    mirrors.close()
    return round(statistics.median(took[2:]) * 1e3, 2)


def mirror_ms(training: carpool.Training) -> dict[str, float]:
    """A mirror without checksum, beside a container with one, of the same state."""
    from carpool.runtime.container import pack

    trainer = Trainer(training)
    trainer.step()
    mirrors = Mirrors("bench")
    state = trainer.state_dict()
    write_mirror(mirrors.next, 1, state)
    fd = mirrors.next
    return {
        "write_ms": median_ms(lambda: write_mirror(fd, 1, state)),
        "read_ms": median_ms(lambda: read_mirror(fd)),
        "with_checksum_ms": median_ms(lambda: sum(map(len, pack(state)))),
    }


def median_ms(work: Callable[[], object], times: int = 9) -> float:
    """How long something takes."""
    took = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        took.append(time.perf_counter() - began)
    return round(statistics.median(took) * 1e3, 2)


async def small_things(nursery: Nursery, core: int) -> dict[str, float]:
    """Births, a look at an empty channel, and a question with its answer."""
    births = []
    for _ in range(9):
        worker, birth = await forked(nursery, "cnn", core)
        births.append(birth)
        worker.channel.close()
    one, other = pair()
    with one, other:
        channel = Channel(one)
        looks = 20_000
        began = time.perf_counter()
        for _ in range(looks):
            channel.poll()
        look_us = (time.perf_counter() - began) / looks * 1e6
    worker, _ = await forked(nursery, "cnn", core)
    trips = []
    for number in range(200):
        began = time.perf_counter()
        worker.channel.send(Proceed(2 + number, by_token=True))
        await worker.hear(Asked)
        trips.append(time.perf_counter() - began)
    worker.channel.close()
    medians = {name: round(statistics.median(birth[name] for birth in births), 1) for name in births[0]}
    return {**medians, "look_us": round(look_us, 2), "round_trip_us": round(statistics.median(trips) * 1e6, 1)}


async def measure(device: str, rounds: int) -> dict[str, Any]:
    """All of it."""
    core = min(os.sched_getaffinity(0))
    if device == "cpu":
        os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    nursery = Nursery(lambda exited: None)
    began = time.perf_counter()
    await nursery.start()
    started = round(time.perf_counter() - began, 2)
    figures: dict[str, Any] = {"device": device, "nursery_start_s": started, "overhead": []}
    try:
        if device == "cpu":
            figures["small"] = await small_things(nursery, core)
            print(f"nursery {started} s; {figures['small']}", flush=True)
        print(f"{'model':16} {'step':>9}  worker/like  worker/bare  trainer/like  like/bare", flush=True)
        by = "core" if device == "cpu" else "clock"
        for entry in MODELS[device]:
            row = await overhead(nursery, entry, device, rounds, core)
            figures["overhead"].append(row)
            shown = [row[f"{way}_{by}"] for way in SHOWN]
            print(
                f"{row['model']:16} {row['step_ms']:6.2f} ms  {shown[0]:11.3f}  {shown[1]:11.3f}  {shown[2]:12.3f}  "
                f"{shown[3]:9.3f}  {'' if row['within'] else 'ABOVE THE LIMIT'}",
                flush=True,
            )
    finally:
        await nursery.stop()
    if device == "cpu":
        figures["mirror"] = mirror_ms(mlp())
        print(f"mirror of a million parameters with momentum: {figures['mirror']}")
    return figures


def main() -> int:
    """Measure, print, write the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--out", type=Path, default=None, help="default: benchmarks/results/runtime_overhead*.json")
    parser.add_argument("--serve", nargs=2, metavar=("LOOP", "MODEL"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve(*options.serve, device=torch.device(options.device))
    figures = asyncio.run(asyncio.wait_for(measure(options.device, options.rounds), GUARD_S))
    out = options.out or RESULTS / f"runtime_overhead{'' if options.device == 'cpu' else '_gpu'}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"schema": 1, **conditions(), **figures}, indent=1) + "\n", encoding="utf-8")
    return 0 if all(result["within"] for result in figures["overhead"]) else 1


if __name__ == "__main__":
    sys.exit(main())
