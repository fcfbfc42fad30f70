"""What carpool costs a training that runs alone, beside a bare PyTorch loop in the same run; how fast workers start.

    python benchmarks/runtime_overhead.py [--rounds 15] [--steps 20] [--out FILE]

A round is some steps of the bare loop, of a `Trainer` and of a worker, each in a process of its own that rests
meanwhile, in changing order, with one thread on the same core. A worker makes the steps of a round freely, as it does
all its life; it says when they are made. Ratios are taken within rounds, so that what else goes on in the machine
matters less, and their median is reported: by the clock, and by time on the core. Exits with 1 when the worker's
median ratio by time on the core is above 1.02 on a step of 10 ms or more.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import carpool
from carpool.runtime.channel import AsyncChannel, Channel, pair
from carpool.runtime.datasets.tensors import TensorData
from carpool.runtime.memory import Mirrors
from carpool.runtime.mirror import read_mirror, write_mirror
from carpool.runtime.nursery import Nursery
from carpool.runtime.protocol import Alive, Asked, Begin, Grant, Message, Proceed, Publish, Published, Ready, Stepped
from carpool.runtime.trainer import Trainer

ROOT = Path(__file__).resolve().parent.parent
LIMIT, LONG_ENOUGH_S = 1.02, 0.010


def cnn() -> carpool.Training:
    """Much to compute for each parameter."""
    body = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(), nn.Flatten()]
    return declared(nn.Sequential(*body, nn.Linear(32 * 49, 10)), (3, 16, 16), 128)


def mlp(batch_size: int = 128) -> carpool.Training:
    """A million parameters."""
    layers = [nn.Linear(256, 896), nn.ReLU(), nn.Linear(896, 896), nn.ReLU(), nn.Linear(896, 10)]
    return declared(nn.Sequential(*layers), (256,), batch_size)


def declared(model: nn.Module, shape: tuple[int, ...], batch_size: int) -> carpool.Training:
    """A training that never ends."""
    data = TensorData(torch.randn(2048, *shape), torch.randint(0, 10, (2048,)))
    return carpool.Training(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        dataset=data,
        loss=lambda model, batch: cross_entropy(model(batch[0]), batch[1]),
        batch_size=batch_size,
        stop=carpool.Stop(steps=10**9),
    )


def mlp_large_batch() -> carpool.Training:
    """The same, with more to compute for each update."""
    return mlp(512)


MODELS: dict[str, Callable[[], carpool.Training]] = {"cnn": cnn, "mlp": mlp, "mlp_large_batch": mlp_large_batch}


@dataclass(frozen=True, slots=True)
class Spent:
    """What some steps took."""

    clock_s: float
    core_s: float


def bare_loop(training: carpool.Training) -> Iterator[None]:
    """The loop that a user would write; it stops after every step."""
    model, optimizer, batch_size = training.model, training.optimizer, training.batch_size
    while True:
        order = torch.randperm(training.num_samples)
        for start in range(0, training.num_samples, batch_size):
            inputs, labels = training.dataset.batch(order[start : start + batch_size])
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            loss.item()
            yield


def trainer_loop(training: carpool.Training) -> Iterator[None]:
    """Carpool's trainer without a worker around it."""
    for _ in Trainer(training).steps():
        yield


LOOPS = {"bare": bare_loop, "trainer": trainer_loop}


def serve(loop: str, model: str) -> int:
    """In a process of its own: make as many steps as each line of input says."""
    torch.set_num_threads(1)
    steps = LOOPS[loop](MODELS[model]())
    print("ready", flush=True)
    for line in sys.stdin:
        began, on_core = time.perf_counter(), time.process_time()
        for _ in range(int(line)):
            next(steps)
        print(time.perf_counter() - began, time.process_time() - on_core, flush=True)
    return 0


class Loop:
    """A process that serves a loop."""

    def __init__(self, loop: str, model: str) -> None:
        command = [sys.executable, __file__, "--serve", loop, model]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        self._out.readline()

    async def make(self, steps: int) -> Spent:
        """Make steps."""
        self._in.write(f"{steps}\n")
        self._in.flush()
        return Spent(*map(float, self._out.readline().split()))

    def close(self) -> None:
        """End it."""
        self._in.close()
        self._process.wait()


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


async def forked(nursery: Nursery, entry: str, core: int) -> tuple[Worker, dict[str, float]]:
    """A worker that waits for its first grant, and how long its birth took."""
    ours, theirs = pair()
    began = time.perf_counter()
    with theirs:
        pid = await nursery.fork(theirs)
    born = time.perf_counter()
    worker = Worker(pid, AsyncChannel(ours))
    program = {"entry": f"{Path(__file__).name}:{entry}", "folder": str(Path(__file__).parent)}
    worker.channel.send(Begin("bench", program, "cpu", cores=(core,)))
    await worker.hear(Ready)
    ready = time.perf_counter()
    worker.channel.send(Proceed(1, by_token=True))
    await worker.hear(Asked)
    return worker, {"fork_ms": (born - began) * 1e3, "begin_to_ready_ms": (ready - born) * 1e3}


async def overhead(nursery: Nursery, entry: Callable[[], carpool.Training], rounds: int, steps: int, core: int) -> Any:
    """Ratios to the bare loop, of the trainer alone and of a worker."""
    worker, _ = await forked(nursery, entry.__name__, core)
    loops = [Loop(name, entry.__name__) for name in LOOPS]
    ways: dict[str, Callable[[int], Awaitable[Spent]]] = {"worker": worker.make}
    ways |= {name: loop.make for name, loop in zip(LOOPS, loops, strict=True)}
    for make in ways.values():
        await make(steps)
    ratios: dict[str, list[float]] = {
        f"{way}_{what}": [] for way in ("trainer", "worker") for what in ("clock", "core")
    }
    step_s = []
    for number in range(rounds):
        names = list(ways) if number % 2 else list(ways)[::-1]
        spent = {name: await ways[name](steps) for name in names}
        step_s.append(spent["bare"].clock_s / steps)
        for way in ("trainer", "worker"):
            ratios[f"{way}_clock"].append(spent[way].clock_s / spent["bare"].clock_s)
            ratios[f"{way}_core"].append(spent[way].core_s / spent["bare"].core_s)
    found = {name: round(statistics.median(values), 4) for name, values in ratios.items()}
    found["publish_ms"] = await publish_ms(worker)
    worker.channel.close()
    for loop in loops:
        loop.close()
    step = statistics.median(step_s)
    within = found["worker_core"] <= LIMIT or step < LONG_ENOUGH_S
    parameters = sum(parameter.numel() for parameter in entry().model.parameters())
    return {
        "model": entry.__name__,
        "parameters": parameters,
        "step_ms": round(step * 1e3, 2),
        **found,
        "within": within,
    }


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


async def measure(rounds: int, steps: int) -> dict[str, Any]:
    """All of it."""
    core = min(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    nursery = Nursery(lambda exited: None)
    began = time.perf_counter()
    await nursery.start()
    started = round(time.perf_counter() - began, 2)
    try:
        small = await small_things(nursery, core)
        print(f"nursery {started} s; {small}", flush=True)
        results = []
        for entry in MODELS.values():
            results.append(await overhead(nursery, entry, rounds, steps, core))
            print(results[-1], flush=True)
    finally:
        await nursery.stop()
    mirror = mirror_ms(mlp())
    print(f"mirror of a million parameters with momentum: {mirror}")
    return {"nursery_start_s": started, "small": small, "overhead": results, "mirror": mirror}


def main() -> int:
    """Measure, print, write the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "runtime_overhead.json")
    parser.add_argument("--serve", nargs=2, metavar=("LOOP", "MODEL"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve(*options.serve)
    figures = asyncio.run(measure(options.rounds, options.steps))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"schema": 1, **circumstances(), **figures}, indent=1) + "\n")
    return 0 if all(result["within"] for result in figures["overhead"]) else 1


def circumstances() -> dict[str, Any]:
    """Where and with what the figures were made."""
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return {
        "version": carpool.__version__,
        "commit": found.stdout.strip() or None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, one used",
    }


if __name__ == "__main__":
    sys.exit(main())
