"""Overhead of Flower per cycle, itemised, with one task and with several: a federation over SuperLink and SuperNodes.

    python benchmarks/federated_flower.py [--save]

Two SuperNodes on this machine, real trainings of a few milliseconds. One message per device and cycle carries all
tasks, so that the overhead should not grow with them. For each message, in seconds:

- push: the ServerApp hands it to the SuperLink;
- to_client_app: until the ClientApp runs (the SuperNode polls every 3 s and starts a process);
- relay: from the ClientApp to the resident device and back, less the time the device worked;
- back: until the ServerApp has the answer;
- device: the device worked.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from pathlib import Path
from typing import Any

from measured import ROOT, save

from carpool.backends.federation_run import FederationRun, fork_server
from carpool.backends.federation_store import FederationStore
from carpool.backends.flower.devices import Timing
from carpool.backends.flower.run import flower_devices
from carpool.federated.federation_file import parse_federation
from carpool.federated.figures import FederationFigures

PARTS = ("push", "to_client_app", "relay", "back", "device")


def itemised(timing: Timing) -> dict[str, float]:
    """Seconds of each part of one message's way."""
    at = timing.stamps
    return {
        "push": at["push_done"] - at["pushed"],
        "to_client_app": at["client_app_started"] - at["push_done"],
        "relay": at["device_answered"] - at["client_app_started"] - timing.device_s,
        "back": at["pulled"] - at["device_answered"],
        "device": timing.device_s,
    }


async def measure(num_tasks: int, rounds: int) -> dict[str, Any]:
    """Run a federation of so many equal tasks over Flower."""
    tasks = [{"name": f"task-{number}", "entry": "digits.py:mlp"} for number in range(num_tasks)]
    data = {"rounds": rounds, "plan": "equal-epochs", "task": tasks, "device": [{"name": "device", "count": 2}]}
    file = parse_federation(data, ROOT / "examples", "benchmark")
    figures = FederationFigures(file.federation)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        async with fork_server() as forks, flower_devices(file, forks, folder) as (devices, _):
            await FederationRun(file, FederationStore(folder), [figures]).run(forks, devices)
            rows = [itemised(timing) for timing in devices.timings]
    found: dict[str, Any] = {part: statistics.median(row[part] for row in rows) for part in PARTS}
    cycles = [each.seconds for each in figures.cycles]
    overheads = [sum(row[part] for part in PARTS if part != "device") for row in rows]
    return {
        "tasks": num_tasks,
        "messages": len(rows),
        "messages_per_device_and_cycle": len(rows) / (2 * len(cycles)),
        "bytes_per_cycle": statistics.fmean(each.num_bytes for each in figures.cycles),
        "cycle_s": statistics.median(cycles),
        "overhead_s": statistics.median(overheads),
        "overhead_range_s": [min(overheads), max(overheads)],
        **found,
    }


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tasks", type=int, nargs="+", default=[1, 5])
    parser.add_argument("--save", action="store_true")
    given = parser.parse_args()
    rows = []
    for num_tasks in given.tasks:
        rows.append(asyncio.run(measure(num_tasks, given.rounds)))
        print(", ".join(f"{name} {value:.3g}" for name, value in rows[-1].items() if isinstance(value, int | float)))
        if given.save:
            save("federated_flower", {"rounds": given.rounds, "rows": rows})


if __name__ == "__main__":
    main()
