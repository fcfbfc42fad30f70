"""Three tasks on four heterogeneous devices on real data: accuracy embedded and over Flower, and each task alone.

    python benchmarks/federated_transports.py [--seeds 20 21 22] [--rounds 10] [--save]

For each seed: all tasks together over Flower (SuperLink and four SuperNodes, plan `balanced`) and embedded, and each
task alone (plan `equal-epochs`) with the same rounds, devices, data and initial weights. Then the journal of the Flower
run is replayed embedded: its facts must give the same orders, and the orders carried out by embedded devices the same
weights, bit for bit. Seed noise is the standard deviation over seeds of training alone.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from pathlib import Path
from typing import Any

from measured import ROOT, save

from carpool.backends.federation_devices import EmbeddedDevices
from carpool.backends.federation_run import FederationRun, TaskSummary, fork_server
from carpool.backends.federation_store import FederationStore
from carpool.backends.flower.run import flower_devices
from carpool.federated.aggregation import next_model
from carpool.federated.coordinator import Coordinator
from carpool.federated.federation import TaskName
from carpool.federated.federation_file import FederationFile, parse_federation
from carpool.federated.messages import Aggregate, StartWork
from carpool.federated.updates import decode_weights, encode_weights, weights_digest
from carpool.runtime.process.channel import Received, close_all
from carpool.runtime.process.forkserver import ForkServer
from carpool.runtime.process.protocol import TasksDone
from carpool.runtime.process.shared_memory import read_memory_file

TASKS: tuple[dict[str, Any], ...] = (
    {"name": "cifar10", "entry": "real_data.py:cifar", "partition": {"sizes": [4, 3, 2, 1]}},
    {"name": "digits", "entry": "real_data.py:digits", "partition": {"scheme": "labels", "alpha": 1.0}},
    {"name": "characters", "entry": "real_data.py:characters", "partition": {"sizes": [1, 2, 3, 4]}},
)
DEVICES = [{"name": f"device-{slowdown}x", "slowdown": slowdown} for slowdown in (1, 2, 4, 8)]
Summaries = dict[TaskName, TaskSummary]


def description(seed: int, plan: str, tasks: tuple[dict[str, Any], ...], rounds: int) -> FederationFile:
    """The federation of these tasks."""
    data = {"rounds": rounds, "plan": plan, "seed": seed, "task": list(tasks), "device": DEVICES}
    return parse_federation(data, ROOT / "benchmarks" / "federated_tasks", "benchmark")


async def embedded(file: FederationFile, forks: ForkServer, folder: Path) -> Summaries:
    """Run a federation on processes of this machine."""
    return await FederationRun(file, FederationStore(folder)).run(forks)


async def over_flower(file: FederationFile, forks: ForkServer, folder: Path) -> Summaries:
    """Run a federation over a SuperLink and SuperNodes of this machine."""
    async with flower_devices(file, forks, folder) as (devices, _):
        return await FederationRun(file, FederationStore(folder)).run(forks, devices)


class Replay:
    """Gives a journal's facts to a coordinator, and carries its orders out on embedded devices."""

    def __init__(self, file: FederationFile, journal: FederationStore) -> None:
        self._file = file
        self._federation, self._records = journal.read()
        self._updates: dict[tuple[str, str], Any] = {}
        self.num_orders = 0

    async def run(self, forks: ForkServer, folder: Path) -> dict[str, str]:
        """The digest of each task's weights at the end."""
        first = await self._initial(forks, folder)
        tasks = {task.name: task for task in self._federation.tasks}
        devices, coordinator = EmbeddedDevices(self._file, forks, folder), Coordinator(self._federation)
        await devices.start()
        try:
            for record in self._records:
                orders = coordinator.handle(record.at, record.facts)
                assert tuple(orders) == tuple(record.orders), f"other orders at {record.at} s"
                self.num_orders += len(orders)
                for order in orders:
                    if isinstance(order, Aggregate):
                        updates = [self._updates[device, order.task] for device in order.devices]
                        first[order.task] = next_model(tasks[order.task], first[order.task], updates, order.weights)
                work = [order for order in orders if isinstance(order, StartWork)]
                for order in work:
                    devices.run(order, [encode_weights(first[each.task].weights) for each in order.work])
                for _ in work:
                    self._take(*await devices.events.get())
        finally:
            await devices.close()
        return {name: weights_digest(model.weights) for name, model in first.items()}

    async def _initial(self, forks: ForkServer, folder: Path) -> dict[TaskName, Any]:
        """The models before the first round."""
        run = FederationRun(self._file, FederationStore(folder))
        return await run.initial_models(forks)

    def _take(self, device: str, event: Any) -> None:
        assert isinstance(event, Received), f"{device}: {event}"
        assert isinstance(event.message, TasksDone), f"{device}: {event.message}"
        done = [result for result in event.message.results if result["steps"]]
        for result, fd in zip(done, event.fds, strict=True):
            self._updates[device, result["task"]] = decode_weights(read_memory_file(fd))
        close_all(event.fds)


async def measure(seed: int, rounds: int) -> dict[str, Any]:
    """All runs of one seed."""
    together = description(seed, "balanced", TASKS, rounds)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for each in (*[task["name"] for task in TASKS], "embedded", "flower", "replay"):
            (folder / each).mkdir()
        async with fork_server() as forks:
            alone: dict[str, float] = {}
            for task in TASKS:
                one = await embedded(description(seed, "equal-epochs", (task,), rounds), forks, folder / task["name"])
                alone |= _accuracy(one)
            local = await embedded(together, forks, folder / "embedded")
            flower = await over_flower(together, forks, folder / "flower")
            replay = Replay(together, FederationStore(folder / "flower"))
            digests = await replay.run(forks, folder / "replay")
    return {
        "seed": seed,
        "alone": alone,
        "embedded": _accuracy(local),
        "flower": _accuracy(flower),
        "orders": replay.num_orders,
        "same_digests": digests == {name: each.digest for name, each in flower.items()},
    }


def _accuracy(summaries: Summaries) -> dict[str, float]:
    return {name: each.metrics[-1][1]["accuracy"] for name, each in summaries.items()}


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    for task in (each["name"] for each in TASKS):
        shown = []
        for way in ("alone", "embedded", "flower"):
            values = [row[way][task] for row in rows]
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            shown.append(f"{way} {statistics.fmean(values):.4f} ± {spread:.4f}")
        print(f"{task:12} {', '.join(shown)}")
    orders, digests = [row["orders"] for row in rows], [row["same_digests"] for row in rows]
    print(f"journal of Flower replayed embedded: {orders} orders equal, digests equal {digests}")


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seeds", type=int, nargs="+", default=[20, 21, 22])
    parser.add_argument("--save", action="store_true")
    given = parser.parse_args()
    rows = []
    for seed in given.seeds:
        rows.append(asyncio.run(measure(seed, given.rounds)))
        show(rows)
        if given.save:
            save("federated_transports", {"rounds": given.rounds, "rows": rows})


if __name__ == "__main__":
    main()
