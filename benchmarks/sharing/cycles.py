"""Cycles of a federation on a GPU that plays one device after the other: the work of each is really done.

A device's trainings run at once on resident seats, each makes the steps that the plan orders, and the device's cycle
ends with the last of them. The coordinator and its plans are carpool's; only the clock of a device may be slower.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, log
from typing import NamedTuple

from sharing.mixes import Mix
from sharing.room import PLAIN, Guest, Room

from carpool.backends.online_estimator import OnlineEstimator
from carpool.core.messages import ProgressReported
from carpool.core.model import Allocation, Job, JobId, JobSpec, Kind, Phase
from carpool.core.topology import Cluster, Neighbour
from carpool.federated.coordinator import Coordinator
from carpool.federated.cycle_plan import CyclePlanner, DeviceState
from carpool.federated.federation import DeviceName, Federation, Task, TaskName
from carpool.federated.figures import FederationFigures
from carpool.federated.messages import DeviceJoined, Order, StartWork, TaskResult, Work, WorkReported
from carpool.federated.partition import Partition

KIND = Kind("H200")  # whose retention model the estimator starts from
_SAMPLES = 50_000  # of each task, as CIFAR-10 has
_REPORTS = 4  # of one window: an estimator takes a rate for measured once several reports agree

Shares = tuple[float, ...]


class Device(NamedTuple):
    """One device of the fleet: its samples of each task, and how many times slower than the GPU it is."""

    name: DeviceName
    volumes: dict[TaskName, int]
    slowdown: float


class Cycle(NamedTuple):
    """What a cycle did: samples of each task on each device, and the emulated seconds of each device."""

    samples: Mapping[DeviceName, Mapping[TaskName, int]]
    seconds: Mapping[DeviceName, float]

    @property
    def cycle_s(self) -> float:
        """Until the last device is done: the synchronisation point."""
        return max(self.seconds.values())

    @property
    def idle_part(self) -> float:
        """Part of the devices' time in which they wait for the last one."""
        return 1.0 - sum(self.seconds.values()) / (self.cycle_s * len(self.seconds))

    def throughputs(self) -> list[float]:
        """P: samples of each task over all devices, per second of the cycle."""
        return [count / self.cycle_s for count in self.counts()]

    def counts(self) -> list[int]:
        """Samples of each task over all devices."""
        return [sum(counts) for counts in zip(*[tasks.values() for tasks in self.samples.values()], strict=True)]


def average(ours: Cycle, base: Cycle) -> float:
    """Σ P / Σ P(baseline) over tasks."""
    return sum(ours.throughputs()) / sum(base.throughputs())


def fairness(ours: Cycle, base: Cycle) -> float:
    """Geometric mean of P / P(baseline) over tasks."""
    pairs = list(zip(ours.throughputs(), base.throughputs(), strict=True))
    return exp(sum(log(one / other) for one, other in pairs) / len(pairs))


def _names(whole: Mix) -> list[TaskName]:
    return [TaskName(task.name) for task in whole.tasks]


def fleet(
    whole: Mix, sizes: Sequence[Sequence[float]], slowdowns: Sequence[float], samples: int = _SAMPLES
) -> list[Device]:
    """Devices whose volumes of each task stand in the proportions of one row of `sizes`."""
    count = len(slowdowns)
    parts = [
        [len(part) for part in Partition(sizes=tuple(row)).split(samples, count)] for row in sizes[: len(whole.tasks)]
    ]
    return [
        Device(
            DeviceName(f"device-{place}"),
            {name: parts[number][place] for number, name in enumerate(_names(whole))},
            slowdown,
        )
        for place, slowdown in enumerate(slowdowns)
    ]


def federation(whole: Mix, plan: str, epochs: float, levels: Sequence[int]) -> Federation:
    """The tasks of a mix at their own batch sizes."""
    tasks = [Task(TaskName(task.name), rounds=1000, batch_size=task.batch) for task in whole.tasks]
    return Federation(tuple(tasks), plan, epochs, levels=tuple(level / 100 for level in levels))


def ordered(rules: Federation, devices: Sequence[Device]) -> dict[DeviceName, tuple[Work, ...]]:
    """The work of a cycle under a plan that needs no measurements."""
    states = [DeviceState(device.name, KIND, device.volumes) for device in devices]
    planner = CyclePlanner(rules, OnlineEstimator(Cluster.build([(1, 1, KIND)])))
    plans = planner.plan({task.name: (task, 0) for task in rules.tasks}, states)
    return {name: plan.work for name, plan in plans.items()}


def steps_of(work: Sequence[Work]) -> list[int]:
    """Steps for the samples of each task; the last one is done as a whole one."""
    return [-(-each.samples // each.batch_size) for each in work]


def _samples(work: Sequence[Work]) -> dict[TaskName, int]:
    return {each.task: count * each.batch_size for each, count in zip(work, steps_of(work), strict=True)}


@dataclass(slots=True)
class Fleet:
    """Devices with the seats of a mix: plain processes for what people run, lanes for what carpool runs."""

    whole: Mix
    plain: Room
    lanes: Room
    ours: bool = True  # carpool's trainer makes the steps in lanes; else they are bare graphs

    def in_sequence(self, orders: Mapping[DeviceName, tuple[Work, ...]], rates: Sequence[float]) -> dict[str, float]:
        """Seconds of each device that trains one task after the other, at rates measured alone."""
        return {
            name: sum(count / rate for count, rate in zip(_samples(work).values(), rates, strict=True))
            for name, work in orders.items()
        }

    def sliced(
        self, orders: Mapping[DeviceName, tuple[Work, ...]], *, eager: bool, part: float = 1.0
    ) -> dict[str, float]:
        """Seconds of each device whose tasks are plain processes that the driver slices time between.

        Only a `part` of the steps is made, and the seconds scaled: eager steps are slow.
        """
        guests = self.whole.at(PLAIN)
        found: dict[str, float] = {}
        for name, work in orders.items():
            wanted = steps_of(work)
            made = [max(1, round(count * part)) for count in wanted]
            found[name] = max(self.plain.work(guests, made, eager=eager)) * sum(wanted) / sum(made)
        return found

    def in_lanes(self, orders: Mapping[DeviceName, tuple[Work, ...]], shares: Shares = ()) -> dict[str, float]:
        """Seconds of each device whose tasks are carpool's trainings in lanes; of the ordered shares if none given."""
        found: dict[str, float] = {}
        for name, work in orders.items():
            guests = self.guests(shares or tuple(each.share for each in work))
            found[name] = max(self.lanes.work(guests, steps_of(work)))
        return found

    def guests(self, shares: Shares) -> list[Guest]:
        """The tasks at these shares; missing ones are seated."""
        guests = self.whole.at(*[round(100 * share) for share in shares], ours=self.ours)
        self.lanes.seat(guests)
        return guests


def cycle_of(
    orders: Mapping[DeviceName, tuple[Work, ...]], seconds: Mapping[str, float], devices: Sequence[Device]
) -> Cycle:
    """A cycle from measured seconds, on the clocks of the devices."""
    slowed = {device.name: seconds[device.name] * device.slowdown for device in devices}
    return Cycle({name: _samples(work) for name, work in orders.items()}, slowed)


@dataclass(slots=True)
class Lessons:
    """The live estimator, and the rates that windows showed it."""

    fleet: Fleet
    seconds: float
    estimator: OnlineEstimator = field(default_factory=lambda: OnlineEstimator(Cluster.build([(1, 1, KIND)])))
    alone: list[float] = field(default_factory=list)  # samples per second of each task
    known: dict[Shares, list[float]] = field(default_factory=dict)

    def learn_alone(self) -> None:
        """Measure each task in a lane of the whole device."""
        guests = self.fleet.guests((1.0,))
        self.alone = [self.fleet.lanes.run([guest], self.seconds)[0] for guest in guests]
        for place, rate in enumerate(self.alone):
            self._report(place, 1.0, (), rate, alone=True)

    def verify(self, shares: Shares) -> bool:
        """Measure the tasks together at these shares, unless they were; whether anything was learned."""
        if shares in self.known:
            return False
        rates = self.known[shares] = self.fleet.lanes.run(self.fleet.guests(shares), self.seconds)
        for _ in range(_REPORTS):
            for place, rate in enumerate(rates):
                others = [
                    Neighbour(self._spec(other), share, 0) for other, share in enumerate(shares) if other != place
                ]
                self._report(place, shares[place], tuple(others), rate)
        return True

    def _spec(self, place: int) -> JobSpec:
        task = self.fleet.whole.tasks[place]
        return JobSpec(JobId(task.name), model=task.name, batch_size=task.batch)

    def _report(
        self, place: int, share: float, others: tuple[Neighbour, ...], rate: float, *, alone: bool = False
    ) -> None:
        spec = self._spec(place)
        job = Job(spec, place, 0.0, Phase.RUNNING, observed=Allocation.of(0, fraction=share))
        self.estimator.neighbours_of = lambda job: others
        steps_per_s = rate / spec.batch_size
        self.estimator.learn(0.0, job, ProgressReported(spec.id, 0, 0.0, steps_per_s, alone=alone))


class OurRun(NamedTuple):
    """Measured cycles of a federation that carpool's coordinator plans."""

    cycles: list[Cycle]
    figures: FederationFigures
    shares: dict[DeviceName, Shares]  # of the last cycle


def run_ours(rules: Federation, devices: Sequence[Device], lessons: Lessons, cycles: int) -> OurRun:
    """Let the coordinator run cycles: each order is carried out, and its shares are verified before the next plan."""
    figures = FederationFigures(rules)
    coordinator = Coordinator(rules, lessons.estimator, [figures])
    names = [task.name for task in rules.tasks]
    joined = [
        DeviceJoined(
            device.name,
            KIND,
            {str(name): volume for name, volume in device.volumes.items()},
            {name: device.slowdown / rate for name, rate in zip(names, lessons.alone, strict=True)},
        )
        for device in devices
    ]
    orders = coordinator.handle(0.0, joined)
    found: list[Cycle] = []
    shares: dict[DeviceName, Shares] = {}
    while True:
        starts = {order.device: order for order in orders if isinstance(order, StartWork)}
        work = {device.name: starts[device.name].work for device in devices}
        shares = {name: tuple(each.share for each in given) for name, given in work.items()}
        for wanted in shares.values():
            lessons.verify(wanted)
        cycle = cycle_of(work, lessons.fleet.in_lanes(work), devices)
        found.append(cycle)
        if len(found) == cycles:
            return OurRun(found, figures, shares)
        orders = _report(coordinator, starts, cycle)


def _report(coordinator: Coordinator, starts: Mapping[DeviceName, StartWork], cycle: Cycle) -> list[Order]:
    """Report the devices in the order in which they are done; the orders that follow."""
    began = coordinator.at
    orders: list[Order] = []
    for name, seconds in sorted(cycle.seconds.items(), key=lambda item: item[1]):
        given = starts[name]
        counts = zip(given.work, steps_of(given.work), strict=True)
        results = [TaskResult(work.task, work.round, work.samples, count) for work, count in counts]
        orders = coordinator.handle(began + seconds, [WorkReported(name, given.cycle, tuple(results))])
    return orders
