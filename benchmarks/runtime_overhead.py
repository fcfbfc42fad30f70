"""Measures the overhead of carpool for a training that runs alone, beside a bare PyTorch loop.

    python benchmarks/runtime_overhead.py [--device cuda] [--births 8] [--rounds 3] [--limit-s 400] [--out FILE]

Variants of the same steps, each in a forked process that pauses while others compute:

- ``bare``: the loop of a good user: data on the device, nothing read back but the loss now and then;
- ``like``: the same loop with carpool's settings: deterministic algorithms, and on CPU its allocator settings and huge
  pages. The difference between it and a worker are our hooks;
- ``twin``, on CPU: that loop again. Their ratio is measurement noise; workers are compared with the mean of both;
- ``graphed``, on CUDA: that loop with its step as one CUDA graph, as in a worker;
- ``trainer``: a `Trainer` without a worker around it;
- ``worker``: carpool.

Memory placement makes steps some per cent faster or slower from start to start, so each variant is started several
times, and the standard error over starts is reported. The first two trainings compute almost nothing, so their
difference is the hooks and the optimizer's foreach form; the second walks through 32 MiB in every step, because hooks
cost more with cold caches. A round is some steps of each in changing order on one thread of the same core (on CUDA: on
one GPU, each round ends when the device has finished). Ratios are taken within rounds; the median is reported by the
clock, and on CPU also by CPU time. Exits with 1 when the worker's median ratio to ``like`` (on CPU by CPU time), or on
CUDA to ``graphed``, is above 1.02 on a step of 10 ms or more.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import torch
from measured import RESULTS, Patience, conditions
from trials.loops import GUARD_S, Loop, Spent, Unborn, loops_on, named, on_core_s, serve
from trials.steps import MODELS, mlp

import carpool
from carpool.runtime.engine.trainer import Trainer
from carpool.runtime.process.channel import AsyncChannel, Channel, Closed, pair
from carpool.runtime.process.forkserver import ForkServer
from carpool.runtime.process.protocol import (
    Alive,
    Begin,
    Grant,
    Message,
    Noted,
    Proceed,
    Publish,
    Published,
    Ready,
    Stepped,
    TurnRequested,
)
from carpool.runtime.process.shared_memory import new_memory_file
from carpool.runtime.state.mirror import read_mirror, write_mirror
from carpool.runtime.state.tensor_file import StateParts

LIMIT, LONG_ENOUGH_S = 1.02, 0.010
BIRTHS, ROUNDS = {"cpu": 8, "cuda": 4}, {"cpu": 3, "cuda": 6}  # a birth on CUDA takes long, and matters less
SPELL_S = 0.25  # how long each way computes in a round
Way = Callable[[int], Awaitable[Spent]]


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
            assert isinstance(message, Alive | Stepped | TurnRequested | Noted), message

    async def make(self, steps: int) -> Spent:
        """Make steps."""
        began, on_core = time.perf_counter(), on_core_s(self.pid)
        self.channel.send(Grant(steps))
        await self.hear(TurnRequested)
        return Spent(time.perf_counter() - began, on_core_s(self.pid) - on_core)


async def forked(forkserver: ForkServer, entry: str, core: int, device: str = "cpu") -> tuple[Worker, dict[str, float]]:
    """A worker that waits for its first grant, and how long its birth took."""
    ours, theirs = pair()
    began = time.perf_counter()
    with theirs:
        pid = await forkserver.fork(theirs)
    born = time.perf_counter()
    worker = Worker(pid, AsyncChannel(ours))
    program = {"entry": f"steps.py:{entry}", "folder": str(Path(__file__).parent / "trials")}
    begin = Begin("bench", program, "cpu", cores=(core,)) if device == "cpu" else Begin("bench", program, "cuda:0")
    worker.channel.send(begin)
    await worker.hear(Ready)
    ready = time.perf_counter()
    worker.channel.send(Proceed(1, time_sliced=True))
    await worker.hear(TurnRequested)
    return worker, {"fork_ms": (born - began) * 1e3, "begin_to_ready_ms": (ready - born) * 1e3}


async def begun(
    forkserver: ForkServer, loops: dict[str, Loop], name: str, device: str, stack: contextlib.ExitStack
) -> tuple[Worker, dict[str, Way]]:
    """All ways to make a training's steps, each in a new process, which the stack ends; without those that failed."""
    ways: dict[str, Way] = {}
    for loop in loops.values():
        loop.begin(name)
    try:
        worker, _ = await forked(forkserver, name, min(os.sched_getaffinity(0)), device)
        stack.callback(worker.channel.close)
        ways["worker"] = worker.make
    finally:
        for way, loop in loops.items():
            if loop.is_born():
                stack.callback(loop.end)
                ways[way] = loop.make
    return worker, ways


async def overhead(
    forkserver: ForkServer, loops: dict[str, Loop], name: str, device: str, options: argparse.Namespace
) -> dict[str, Any]:
    """Ratios to the loops without carpool, of the trainer alone and of a worker."""
    made: list[dict[str, Spent]] = []
    steps = 0
    for _ in range(options.births):
        with contextlib.ExitStack() as stack:
            worker, ways = await begun(forkserver, loops, name, device, stack)
            for make in ways.values():
                await make(5)
            steps = steps or max(2, round(SPELL_S / ((await ways["like"](3)).clock_s / 3)))
            for _ in range(options.rounds):
                order = in_turn(list(ways), len(made))
                made.append({way: await ways[way](steps) for way in order})
            published_ms = await publish_ms(worker)
    by_core = device == "cpu"
    found = ratios(made, by_core=by_core)
    births = {name: by_birth(made, options.rounds, name, by_core=by_core) for name in BY_BIRTH}
    step_s = statistics.median(spent["like"].clock_s for spent in made) / steps
    by = "core" if by_core else "clock"
    judged = max(found[f"worker_to_{base}_{by}"] for base in ("like", "graphed") if f"worker_to_{base}_{by}" in found)
    return {
        "model": name,
        "parameters": sum(parameter.numel() for parameter in named(name)().model.parameters()),
        "step_ms": round(step_s * 1e3, 2),
        "hooks_us": hooks_us(made, steps, by_core=by_core),
        "births": options.births,
        "rounds": options.rounds,
        **found,
        **{f"{name}_by_birth": values for name, values in births.items() if values},
        "worker_to_like_error": standard_error(births["worker_to_like"]),
        "publish_ms": published_ms,
        "within": judged <= LIMIT or step_s < LONG_ENOUGH_S,
    }


def in_turn(ways: list[str], number: int) -> list[str]:
    """The order of a round: each way comes first in turn, and every other round goes backwards."""
    first = number % len(ways)
    order = ways[first:] + ways[:first]
    return order[::-1] if number % 2 else order


SHOWN = ("worker_to_like", "worker_to_bare", "trainer_to_like", "like_to_bare", "twin_to_like", "worker_to_graphed")
BY_BIRTH = ("worker_to_like", "trainer_to_like", "twin_to_like")


def by_birth(made: list[dict[str, Spent]], rounds: int, name: str, *, by_core: bool) -> list[float]:
    """One of the ratios, for each birth; none where it could not be made."""
    each = [ratios(made[first : first + rounds], by_core=by_core) for first in range(0, len(made), rounds)]
    key = f"{name}_{'core' if by_core else 'clock'}"
    return [found[key] for found in each if key in found]


def standard_error(values: list[float]) -> float | None:
    """How far the mean of values would lie from that of other ones; unknown for less than two."""
    return round(statistics.stdev(values) / math.sqrt(len(values)), 4) if len(values) > 1 else None


def hooks_us(made: list[dict[str, Spent]], steps: int, *, by_core: bool) -> float:
    """What a worker's step takes longer than one of the like loops."""
    taken = [(base_of(each, "worker", "like"), each["worker"]) for each in made]
    longer = [way.core_s - like.core_s if by_core else way.clock_s - like.clock_s for like, way in taken]
    return round(statistics.median(longer) / steps * 1e6, 1)


def base_of(spent: dict[str, Spent], way: str, base: str) -> Spent:
    """What a way is held against in a round: for the like loop the mean of both that there are, but for its twin."""
    one, other = spent[base], spent.get("twin")
    if base != "like" or way == "twin" or other is None:
        return one
    return Spent((one.clock_s + other.clock_s) / 2, (one.core_s + other.core_s) / 2)


def ratios(made: list[dict[str, Spent]], *, by_core: bool) -> dict[str, float]:
    """Median ratios within rounds, of the ways that could be made in all of them."""
    found = {}
    for name in SHOWN:
        way, base = name.split("_to_")
        if not all({way, base} <= spent.keys() for spent in made):
            continue
        pairs = [(spent[way], base_of(spent, way, base)) for spent in made]
        found[f"{name}_clock"] = [one.clock_s / other.clock_s for one, other in pairs]
        if by_core:
            found[f"{name}_core"] = [one.core_s / other.core_s for one, other in pairs]
    return {name: round(statistics.median(values), 4) for name, values in found.items()}


async def publish_ms(worker: Worker) -> float:
    """What a mirror takes, from asking for it to its being there; the second time into each of two memory files."""
    mirrors = new_memory_file("bench"), new_memory_file("bench")
    took = []
    for number in range(6):
        began = time.perf_counter()
        worker.channel.send(Publish(), [mirrors[number % 2]])
        await worker.hear(Published)
        took.append(time.perf_counter() - began)
    for mirror in mirrors:
        os.close(mirror)
    return round(statistics.median(took[2:]) * 1e3, 2)


def mirror_ms(training: carpool.Training) -> dict[str, float]:
    """A mirror without checksum, beside a container with one, of the same state."""
    from carpool.runtime.state.tensor_file import pack

    trainer = Trainer(training)
    trainer.step()
    fd, state = new_memory_file("bench"), trainer.state_dict()
    write_mirror(fd, 1, StateParts.of(state))
    return {
        "write_ms": median_ms(lambda: write_mirror(fd, 1, StateParts.of(state))),
        "read_ms": median_ms(lambda: read_mirror(fd)),
        "with_checksum_ms": median_ms(lambda: sum(map(len, pack(state)))),
    }


def update_ms() -> dict[str, dict[str, dict[str, float]]]:
    """A step of two optimizers in each of their forms: a million elements in few and in many parameters."""
    forms: dict[str, dict[str, bool]] = {
        "one_by_one": {"foreach": False},
        "all_at_once": {"foreach": True},
        "fused": {"fused": True},
    }
    found: dict[str, dict[str, dict[str, float]]] = {"SGD": {}, "Adam": {}}
    for name, sizes in {"large": [256 * 896, 896 * 896, 8960], "small": [1024] * 1024}.items():
        for way, form in forms.items():
            weights = [torch.nn.Parameter(torch.randn(size)) for size in sizes]
            for weight in weights:
                weight.grad = torch.randn_like(weight)
            sgd = torch.optim.SGD(weights, lr=0.01, momentum=0.9, **form)
            found["SGD"].setdefault(name, {})[way] = median_ms(sgd.step, 50)
            adam = torch.optim.Adam(weights, lr=0.01, **form)
            found["Adam"].setdefault(name, {})[way] = median_ms(adam.step, 50)
    return found


def median_ms(work: Callable[[], object], times: int = 9) -> float:
    """How long something takes."""
    took = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        took.append(time.perf_counter() - began)
    return round(statistics.median(took) * 1e3, 2)


async def small_things(forkserver: ForkServer, core: int) -> dict[str, float]:
    """Births, a look at an empty channel, and a question with its answer."""
    births = []
    for _ in range(9):
        worker, birth = await forked(forkserver, "cnn", core)
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
    worker, _ = await forked(forkserver, "cnn", core)
    trips = []
    for number in range(200):
        began = time.perf_counter()
        worker.channel.send(Proceed(2 + number, time_sliced=True))
        await worker.hear(TurnRequested)
        trips.append(time.perf_counter() - began)
    worker.channel.close()
    medians = {name: round(statistics.median(birth[name] for birth in births), 1) for name in births[0]}
    return {**medians, "look_us": round(look_us, 2), "round_trip_us": round(statistics.median(trips) * 1e6, 1)}


async def measure(device: str, options: argparse.Namespace, keep: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """All of it; what is known is kept after every row."""
    core = min(os.sched_getaffinity(0))
    if device == "cpu":
        os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    patience = Patience(options.limit_s)
    loops = {loop: Loop(__file__, loop, device) for loop in loops_on(device)}
    forkserver = ForkServer(lambda exited: None)
    began = time.perf_counter()
    await forkserver.start()
    started = round(time.perf_counter() - began, 2)
    figures: dict[str, Any] = {"device": device, "forkserver_start_s": started, "overhead": [], "failed": []}
    try:
        for loop in loops.values():
            loop.await_ready()
        print(f"{'model':16} {'step':>9}  {'  '.join(SHOWN).replace('_to_', '/')}  worker-like", flush=True)
        for entry in MODELS[device]:
            if patience.is_over or (options.only and entry.__name__ not in options.only.split(",")):
                continue
            try:
                row = await overhead(forkserver, loops, entry.__name__, device, options)
            except (Unborn, Closed, KeyError, ValueError, AssertionError) as error:
                figures["failed"].append(f"{entry.__name__}: {error!r}")
                print(figures["failed"][-1], flush=True)
                keep(figures)
                continue
            figures["overhead"].append(row)
            keep(figures)
            show(row, "core" if device == "cpu" else "clock")
        if device == "cpu" and not options.only:
            figures["small"] = await small_things(forkserver, core)
            print(f"forkserver {started} s; {figures['small']}", flush=True)
            figures["update"] = update_ms()
            print(f"updates of a million parameters, ms: {figures['update']}", flush=True)
            figures["mirror"] = mirror_ms(mlp())
            print(f"mirror of a million parameters with momentum: {figures['mirror']}")
            keep(figures)
    finally:
        for loop in loops.values():
            loop.close()
        await forkserver.stop()
    return figures


def show(row: dict[str, Any], by: str) -> None:
    """One row."""
    shown = [f"{row.get(f'{way}_{by}', math.nan):{len(way) - 3}.3f}" for way in SHOWN]
    print(
        f"{row['model']:16} {row['step_ms']:6.2f} ms  {'  '.join(shown)}  {row['hooks_us']:8.0f} us  "
        f"{'' if row['within'] else 'ABOVE THE LIMIT'}",
        flush=True,
    )


def main() -> int:
    """Measure, print, write the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--births", type=int, help=f"how often all are begun anew; default: {BIRTHS}")
    parser.add_argument("--rounds", type=int, help=f"of all, for each birth; default: {ROUNDS}")
    parser.add_argument("--only", help="some of the trainings, divided by commas")
    parser.add_argument("--limit-s", type=float, default=400.0, help="begin no training after so many seconds")
    parser.add_argument("--out", type=Path, default=None, help="default: benchmarks/results/runtime_overhead*.json")
    parser.add_argument("--serve", metavar="LOOP", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve(options.serve, device=torch.device(options.device))
    options.births = options.births or BIRTHS[options.device]
    options.rounds = options.rounds or ROUNDS[options.device]
    out = options.out or RESULTS / f"runtime_overhead{'' if options.device == 'cpu' else '_gpu'}.json"
    out.parent.mkdir(parents=True, exist_ok=True)

    def keep(figures: dict[str, Any]) -> None:
        out.write_text(json.dumps({"schema": 1, **conditions(), **figures}, indent=1) + "\n", encoding="utf-8")

    figures = asyncio.run(asyncio.wait_for(measure(options.device, options, keep), GUARD_S))
    return 0 if figures["overhead"] and all(result["within"] for result in figures["overhead"]) else 1


if __name__ == "__main__":
    sys.exit(main())
