"""Cycles of a federation through the device processes of `carpool federate`, which one GPU plays in turn.

Each device has a process per task, a client of MPS with the lane of its plan; the coordinator learns from what the
processes report. Where there is no GPU the lanes have no effect, to try the benchmark out.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from measured import ROOT
from sharing.cycles import KIND, Cycle, Device, OurRun
from sharing.mixes import Mix

from carpool.backends.federation_devices import HostedProcess, run_message, send, start_device, start_process
from carpool.backends.federation_lanes import FederationLanes
from carpool.backends.federation_run import fork_server
from carpool.core.errors import CarpoolError
from carpool.federated.coordinator import Coordinator
from carpool.federated.federation import DeviceName, Federation, TaskName
from carpool.federated.federation_file import FederatedDevice, FederationFile, parse_federation
from carpool.federated.figures import FederationFigures
from carpool.federated.messages import DeviceJoined, Order, StartWork, TaskResult, WorkReported
from carpool.runtime.process.channel import close_all
from carpool.runtime.process.protocol import Alive, HostTasks, TasksDone
from carpool.runtime.sharing.mps_daemon import PERCENTAGE

_WORK_S = 120.0  # of one device in one cycle at most


class _PretendedLanes(FederationLanes):
    """Lanes without effect."""

    def environment(self, device: FederatedDevice) -> dict[str, str]:
        return {PERCENTAGE: "100"}


class Played(NamedTuple):
    """What a device did in a cycle."""

    results: list[TaskResult]
    busy_s: float  # until its last task is done, without the exchange of weights and the start of processes
    whole_s: float  # with them


@dataclass(slots=True)
class Workers:
    """The loaded processes of a fleet."""

    runner: asyncio.Runner
    processes: dict[DeviceName, HostedProcess]
    about: dict[DeviceName, dict[str, Any]]
    weights: dict[TaskName, bytes]

    @property
    def have_lanes(self) -> bool:
        return all("load_s" in each for tasks in self.about.values() for each in tasks.values())

    def joined(self, device: Device) -> DeviceJoined:
        """The fact that a device is ready, on its own clock."""
        about = self.about[device.name]
        sample_s = {name: each["sample_s"] * device.slowdown for name, each in about.items()}
        load_s = {name: each["load_s"] * device.slowdown for name, each in about.items() if "load_s" in each}
        return DeviceJoined(
            device.name, KIND, {name: each["volume"] for name, each in about.items()}, sample_s, load_s=load_s
        )

    def play(self, order: StartWork) -> Played:
        """Let one device work, from the initial weights."""
        return self.runner.run(asyncio.wait_for(self._play(order), _WORK_S))

    async def _play(self, order: StartWork) -> Played:
        process = self.processes[order.device]
        send(process.channel, run_message(order), [self.weights[work.task] for work in order.work])
        received = await process.channel.receive()
        while isinstance(received.message, Alive):
            received = await process.channel.receive()
        close_all(received.fds)
        if not isinstance(received.message, TasksDone):
            raise CarpoolError(f"{order.device}: {received.message}")
        results = [TaskResult(**each) for each in received.message.results]
        if failed := [each for each in results if not each.steps]:
            raise CarpoolError(f"{order.device}: {failed[0].task}: {failed[0].detail}")
        busy = [each.busy_s for each in results]
        is_side_by_side = self.have_lanes and not order.in_turn
        return Played(results, max(busy) if is_side_by_side else sum(busy), received.message.seconds)


def described(whole: Mix, sizes: Sequence[Sequence[float]], devices: Sequence[Device], device: str) -> FederationFile:
    """The federation file of a mix on a fleet."""
    samples = [sum(each.volumes[TaskName(task.name)] for each in devices) for task in whole.tasks]
    tasks = [
        {
            "name": task.name,
            "entry": "published.py:published",
            "args": {"model": task.model, "batch": task.batch, "samples": count, **task.sizes},
            "batch_size": task.batch,
            "partition": {"sizes": list(row)},
        }
        for task, count, row in zip(whole.tasks, samples, sizes, strict=False)
    ]
    data = {"task": tasks, "device": [{"name": each.name, "device": device} for each in devices]}
    return parse_federation(data, ROOT / "benchmarks" / "federated_tasks", "benchmark")


@contextmanager
def workers(file: FederationFile) -> Iterator[Workers]:
    """The processes of a federation's devices, loaded one after another."""
    with asyncio.Runner() as runner, tempfile.TemporaryDirectory() as folder:
        context = fork_server()
        forks = runner.run(context.__aenter__())
        kind = FederationLanes if file.devices[0].device != "cpu" else _PretendedLanes
        lanes = kind(file, file.devices)
        found = Workers(runner, {}, {}, {})

        async def load() -> None:
            await lanes.start()
            server, tasks, weights = await start_process(forks, HostTasks("server", file.hosted_tasks()), Path(folder))
            server.close()
            found.weights.update(zip(map(TaskName, tasks), weights, strict=True))
            for device in file.devices:
                process, about = await start_device(forks, file, device, lanes, Path(folder))
                found.processes[device.name], found.about[device.name] = process, about
                loads = ", ".join(f"{each.get('load_s', 0.0):.1f}" for each in about.values())
                print(f"  {device.name} loaded; its tasks in {loads} s", flush=True)

        try:
            runner.run(load())
            yield found
        finally:
            for process in found.processes.values():
                process.close()
            runner.run(lanes.stop())
            runner.run(context.__aexit__(None, None, None))


class WorkerRun(NamedTuple):
    """Measured cycles, and their seconds with the exchange of weights and the start of processes."""

    run: OurRun
    whole_s: list[float]
    in_turn: dict[DeviceName, bool]  # of the last cycle
    batches: dict[DeviceName, list[int]]  # likewise


def run_workers(rules: Federation, devices: Sequence[Device], hosts: Workers, cycles: int) -> WorkerRun:
    """Let the coordinator run cycles through the processes; exchange and starts are left out of its clock."""
    figures = FederationFigures(rules)
    coordinator = Coordinator(rules, observers=[figures])
    orders: Sequence[Order] = coordinator.handle(0.0, [hosts.joined(device) for device in devices])
    found: list[Cycle] = []
    whole_s: list[float] = []
    while True:
        starts = {order.device: order for order in orders if isinstance(order, StartWork)}
        played = {device.name: hosts.play(starts[device.name]) for device in devices}
        seconds = {each.name: played[each.name].busy_s * each.slowdown for each in devices}
        samples = {name: {each.task: each.samples for each in did.results} for name, did in played.items()}
        found.append(Cycle(samples, seconds))
        whole_s.append(max(played[each.name].whole_s * each.slowdown for each in devices))
        print(f"    cycle {len(found)}: {found[-1].cycle_s:.3f} s, with exchange {whole_s[-1]:.3f} s", flush=True)
        if len(found) == cycles:
            shares = {name: tuple(work.share for work in order.work) for name, order in starts.items()}
            batches = {name: [work.batch_size for work in order.work] for name, order in starts.items()}
            turns = {name: order.in_turn for name, order in starts.items()}
            return WorkerRun(OurRun(found, figures, shares), whole_s, turns, batches)
        orders = _reported(coordinator, starts, played, {each.name: each.slowdown for each in devices}, seconds)


def _reported(
    coordinator: Coordinator,
    starts: Mapping[DeviceName, StartWork],
    played: Mapping[DeviceName, Played],
    slowdowns: Mapping[DeviceName, float],
    seconds: Mapping[DeviceName, float],
) -> Sequence[Order]:
    """Report the devices in the order in which they are done; the orders that follow."""
    began, orders = coordinator.at, list[Order]()
    for name in sorted(seconds, key=lambda name: seconds[name]):
        results = tuple(each._replace(busy_s=each.busy_s * slowdowns[name]) for each in played[name].results)
        orders = coordinator.handle(began + seconds[name], [WorkReported(name, starts[name].cycle, results)])
    return orders


def with_ranges(rules: Federation, least: float, most: float) -> Federation:
    """The federation whose tasks may have batches of so many times their own: objective 1 of the text."""
    tasks = [
        replace(task, batch_range=(max(2, round(least * task.batch_size)), round(most * task.batch_size)))
        for task in rules.tasks
    ]
    return replace(rules, tasks=tuple(tasks))
