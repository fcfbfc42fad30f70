"""Overhead of Flower per cycle, itemised, and how it depends on the number of tasks.

    python benchmarks/federated_flower.py [--cycles 60] [--save]

Two SuperNodes on this machine host five tiny tasks. Each cycle sends every device one message with the work of 1, 3 or
5 of them. Three cycles are a block, with the three counts in random order. For each message, in seconds:

- push: the ServerApp hands it to the SuperLink;
- poll: until the SuperNode has found it and created a process (it polls every 3 s);
- start: until the ClientApp runs (Python starts and imports Flower);
- relay: from the ClientApp to the resident device and back, less the time the device worked;
- back: until the ServerApp has the answer;
- overhead: their sum; without_poll: less the wait for the poll, which is random between 0 and 3 s;
- client_app_cpu: CPU time of the ClientApp's process until the answer, start included.

Medians per number of tasks, and the slope per task with its 95 % interval: the mean over blocks of the least-squares
slope within a block, so that drift of the machine's load does not look like an effect of the tasks.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

from measured import ROOT, save
from scipy.stats import linregress, t

from carpool.backends.federation_devices import Lost
from carpool.backends.federation_run import FederationRun, fork_server
from carpool.backends.federation_store import FederationStore
from carpool.backends.flower.devices import FlowerDevices, Timing
from carpool.backends.flower.run import flower_devices
from carpool.federated.federation import DeviceName, TaskName
from carpool.federated.federation_file import FederationFile, parse_federation
from carpool.federated.messages import StartWork, Work
from carpool.federated.updates import encode_weights
from carpool.runtime.process.channel import Received, close_all

WALL = ("push", "poll", "start", "relay", "back")
PARTS = (*WALL, "overhead", "without_poll", "client_app_cpu")
COUNTS = (1, 3, 5)


def itemised(timing: Timing) -> dict[str, float]:
    """Seconds of each part of one message's way."""
    at = timing.stamps
    found = {
        "push": at["push_done"] - at["pushed"],
        "poll": at["client_app_created"] - at["push_done"],
        "start": at["client_app_started"] - at["client_app_created"],
        "relay": at["device_answered"] - at["client_app_started"] - timing.device_s,
        "back": at["pulled"] - at["device_answered"],
    }
    whole = sum(found.values())
    return {
        **found,
        "overhead": whole,
        "without_poll": whole - found["poll"],
        "client_app_cpu": at["client_app_cpu_s"],
    }


def description() -> FederationFile:
    """Five tiny tasks on two devices."""
    tasks = [
        {"name": f"task-{number}", "entry": "digits.py:mlp", "args": {"hidden": 8}} for number in range(max(COUNTS))
    ]
    data = {"task": tasks, "plan": "equal-epochs", "device": [{"name": "device", "count": 2}]}
    return parse_federation(data, ROOT / "examples", "benchmark")


async def send_cycle(devices: FlowerDevices, cycle: int, names: list[str], weights: dict[str, bytes]) -> None:
    """Order one step of these tasks from every device, and wait for the answers."""
    work = tuple(Work(TaskName(name), 0, 0, 64, 64, 1.0) for name in names)
    for number in range(2):
        order = StartWork(DeviceName(f"device-{number}"), cycle, work)
        devices.run(order, [weights[name] for name in names])
    for _ in range(2):
        name, event = await asyncio.wait_for(devices.events.get(), 120.0)
        if isinstance(event, Lost):
            raise SystemExit(f"{name}: {event.reason}")
        if isinstance(event, Received):
            close_all(event.fds)


async def measure(num_cycles: int) -> list[dict[str, float]]:
    """The parts of every message, with its number of tasks."""
    file, counts = description(), {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        async with fork_server() as forks, flower_devices(file, forks, folder) as (devices, _):
            models = await FederationRun(file, FederationStore(folder)).initial_models(forks)
            weights = {str(task): encode_weights(model.weights) for task, model in models.items()}
            await devices.start()
            order = random.Random(0)
            for cycle in range(1, num_cycles + 1):
                if cycle % len(COUNTS) == 1:
                    block = order.sample(COUNTS, len(COUNTS))
                counts[cycle] = block[(cycle - 1) % len(COUNTS)]
                await send_cycle(devices, cycle, list(weights)[: counts[cycle]], weights)
            return [
                {"tasks": counts[timing.cycle], "block": (timing.cycle - 1) // len(COUNTS), **itemised(timing)}
                for timing in devices.timings
            ]


def summary(rows: list[dict[str, float]]) -> dict[str, Any]:
    """Medians by number of tasks, and slopes per task."""
    found: dict[str, Any] = {"messages": len(rows)}
    for part in PARTS:
        slopes = [slope([row for row in rows if row["block"] == block], part) for block in {r["block"] for r in rows}]
        half = float(t.ppf(0.975, len(slopes) - 1)) * statistics.stdev(slopes) / len(slopes) ** 0.5
        medians = {count: statistics.median(row[part] for row in rows if row["tasks"] == count) for count in COUNTS}
        found[part] = {"median_s": medians, "slope_s": statistics.fmean(slopes), "half_interval_s": half}
    return found


def slope(rows: list[dict[str, float]], part: str) -> float:
    """Least-squares slope of a part per task."""
    return float(linregress([row["tasks"] for row in rows], [row[part] for row in rows]).slope)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=60)
    parser.add_argument("--save", action="store_true")
    given = parser.parse_args()
    cycles = given.cycles // len(COUNTS) * len(COUNTS)
    found = summary(asyncio.run(measure(cycles)))
    print(f"{'part':15}" + "".join(f"{count:>7} tasks" for count in COUNTS) + "   slope per task (95 %), ms")
    for part in PARTS:
        medians = "".join(f"{value:11.4f} s" for value in found[part]["median_s"].values())
        print(f"{part:15}{medians}   {1e3 * found[part]['slope_s']:+.2f} ± {1e3 * found[part]['half_interval_s']:.2f}")
    if given.save:
        save("federated_flower", {"cycles": cycles, **found})


if __name__ == "__main__":
    main()
