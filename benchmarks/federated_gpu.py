"""Samples per cycle of several federated tasks on GPUs: our plans and lanes against what people run.

    PYTHONPATH=src python benchmarks/federated_gpu.py [--mixes R50] [--limit 200] [--worker-limit 300] [--device cpu]

The text's setting: a fleet of devices, each trains three models of the text (as published, on pictures of CIFAR-10's
shape) at batch size 128, with imbalanced data: 50,000 samples of each task, spread over four devices as 4:3:2:1,
1:2:3:4 and 1:8:1:8. One GPU plays the devices in turn, and the work of each is really done; a cycle ends when the last
device has finished the last of its tasks. Devices are equal, or have speeds 1, 1/1.5, 1/2 and 1/3 (their clocks are
slower by that, in all rows). Exchange of weights is the same for all and is left out.

P is the samples of a task that all devices process in a cycle, over the seconds of the cycle. The text does not define
its two measures; ours, both against a baseline:

- average: Σ P / Σ P(baseline) over tasks;
- fairness: geometric mean of P / P(baseline) over tasks.

Baselines have fixed batch sizes and the plan of FedAvg, equal epochs over the data of each device: today's frameworks
do that, and the targets are about it. Rows with equal steps of all tasks on all devices are shown too: they end
together on equal devices, but process as much of a task where its data is as where it is not (equation 1).

- eager: one task after the other (from rates alone), or processes side by side, between which the driver slices time;
- the same two with steps as CUDA graphs;
- lanes: carpool's trainings (graphs, settings for equal bits) under MPS, with equal shares of 33, 50 or 100 % each.

Ours is the plan `shortest` of `carpool federate` (all devices together process as many samples as with the baselines)
with batch sizes fixed too: the coordinator plans by the share search with the live estimator, measured windows of the
shares it chose teach that, and the last two cycles count. Ratios are against the best row of a group, by measure.

- seats: the benchmark's own resident processes with carpool's trainer carry the plan out;
- workers: the device processes of `carpool federate` do, each task a client of MPS, with steps timed as they report
  them; the coordinator has nothing but these reports. Cycles with the exchange of weights are shown beside;
- workers, matched: the same with batch sizes of half to twice their own in proportion to a device's data of each task
  (`batch_range`), so that its tasks make equally many steps: the text's first objective.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from colocation.daemon import mps
from colocation.seat import Gone
from measured import save
from sharing.cycles import (
    Cycle,
    Device,
    Fleet,
    Lessons,
    average,
    cycle_of,
    fairness,
    federation,
    fleet,
    ordered,
    run_ours,
)
from sharing.mixes import Mix, mix, tiny
from sharing.room import PLAIN, Room
from sharing.workers import Workers, described, run_workers, with_ranges, workers

from carpool.core.errors import CarpoolError

MIXES = (
    mix("R50+S2+D121", ("resnet50", 128), ("shufflenet_v2", 128), ("densenet121", 128)),
    mix("V16+R18+M3", ("vgg16", 128), ("resnet18", 128), ("mobilenet_v3", 128)),
    mix("R101+S2+M3", ("resnet101", 128), ("shufflenet_v2", 128), ("mobilenet_v3", 128)),
)
SIZES = ((4, 3, 2, 1), (1, 2, 3, 4), (1, 8, 1, 8))
FLEETS = {"equal devices": (1.0, 1.0, 1.0, 1.0), "speeds 1 to 1/3": (1.0, 1.5, 2.0, 3.0)}
LEVELS = (20, 33, 50, 60, 80, 100)  # shares in percent that our plans may use
EQUAL = (33, 50, 100)
PLANS = ("equal-epochs", "equal-steps")
TARGETS = {"eager": 2.8, "graphs": 1.8, "lanes": 1.25}  # of both measures
_COUNTED = 2  # last cycles of ours
_RANGE = (0.5, 2.0)  # of batch sizes that are matched to volumes, relative to the task's own


class OutOfTime(Exception):
    """The time of the benchmark is over."""


@dataclass(slots=True)
class Setup:
    """How much is measured."""

    epochs: float
    seconds: float  # of a window
    eager_part: float  # of the eager steps of processes side by side that are made
    cycles: int
    levels: Sequence[int]
    equal: Sequence[int]
    samples: int = 50_000  # of each task, as CIFAR-10 has


@dataclass(slots=True)
class Rows:
    """Baseline cycles by group, plan and name, for devices of speed 1."""

    orders: dict[str, Any] = field(default_factory=dict)
    seconds: dict[tuple[str, str, str], dict[str, float]] = field(default_factory=dict)  # group, plan, name


def baselines(lanes: Fleet, whole: Mix, setup: Setup, devices: Sequence[Device], rates: Mapping[str, Any]) -> Rows:
    """Measure all baselines of a mix, once for all fleets: clocks only scale them."""
    rows = Rows()
    for plan in PLANS:
        orders = rows.orders[plan] = ordered(federation(whole, plan, setup.epochs, setup.levels), devices)
        for group, eager in (("eager", True), ("graphs", False)):
            rows.seconds[group, plan, "in sequence"] = lanes.in_sequence(orders, rates[group])
            part = setup.eager_part if eager else 1.0
            rows.seconds[group, plan, "time slicing"] = lanes.sliced(orders, eager=eager, part=part)
        for level in setup.equal:
            shares = (level / 100,) * len(whole.tasks)
            rows.seconds["lanes", plan, f"{level} % each"] = lanes.in_lanes(orders, shares)
        print(f"  {plan} measured", flush=True)
    return rows


def compare(rows: Rows, ours: Sequence[Cycle], devices: Sequence[Device]) -> dict[str, Any]:
    """Ours against every baseline, and per group against the best: the least ratio of each measure."""
    table: list[dict[str, Any]] = []
    for (group, plan, name), seconds in rows.seconds.items():
        base = cycle_of(rows.orders[plan], seconds, devices)
        table.append(
            {
                "group": group,
                "plan": plan,
                "name": name,
                "cycle_s": base.cycle_s,
                "samples_per_s": sum(base.throughputs()),
                "idle_part": base.idle_part,
                "average": statistics.fmean(average(cycle, base) for cycle in ours),
                "fairness": statistics.fmean(fairness(cycle, base) for cycle in ours),
            }
        )
    best = {
        plan: {
            group: {
                measure: min(row[measure] for row in table if (row["plan"], row["group"]) == (plan, group))
                for measure in ("average", "fairness")
            }
            for group in TARGETS
        }
        for plan in PLANS
    }
    return {"baselines": table, "against_best": best}


def measure_mix(rooms: tuple[Room, Room], whole: Mix, setup: Setup, found: dict[str, Any]) -> Rows:
    """The baselines of one mix, and ours on seats, put into `found` as they come."""
    played = Fleet(whole, *rooms)
    load(played, setup)
    rates = {
        group: [played.plain.run([guest], setup.seconds, eager=group == "eager")[0] for guest in whole.at(PLAIN)]
        for group in ("eager", "graphs")
    }
    lessons = Lessons(played, setup.seconds)
    lessons.learn_alone()
    rates["lanes"] = lessons.alone
    for group, values in rates.items():
        print(f"  alone, {group:7} " + " ".join(f"{value:9,.0f}" for value in values), flush=True)
    found |= {"rates_alone": rates, "ours_trains": played.ours, "fleets": {}, "facts": played.lanes.facts}
    for level in setup.equal:
        lessons.verify((level / 100,) * len(whole.tasks))
    rows = baselines(played, whole, setup, fleet(whole, SIZES, (1.0,) * len(SIZES[0]), setup.samples), rates)
    for name, slowdowns in FLEETS.items():
        devices = fleet(whole, SIZES, slowdowns, setup.samples)
        cycles = max(_COUNTED, setup.cycles - 2 * bool(found["fleets"]))  # shares are known by then
        run = run_ours(federation(whole, "shortest", setup.epochs, setup.levels), devices, lessons, cycles)
        result = compare(rows, run.cycles[-_COUNTED:], devices)
        result["ours"] = {
            "cycle_s": [cycle.cycle_s for cycle in run.cycles],
            "samples_per_s": [sum(cycle.throughputs()) for cycle in run.cycles],
            "idle_part": [cycle.idle_part for cycle in run.cycles],
            "residual": [each.mismatch for each in run.figures.cycles],
            "shares": run.shares,
        }
        found["fleets"][name] = result
        show(whole.name, name, result)
    found["vectors"] = [[list(shares), measured] for shares, measured in lessons.known.items()]
    return rows


def measure_workers(whole: Mix, setup: Setup, rows: Rows, device: str, found: dict[str, Any]) -> None:
    """Ours through the device processes of `carpool federate`, put into `found` as it comes."""
    began = time.monotonic()
    equal = fleet(whole, SIZES, (1.0,) * len(SIZES[0]), setup.samples)
    with workers(described(whole, SIZES, equal, device)) as hosts:
        load_s = time.monotonic() - began
        print(f"{whole.name}: device processes loaded in {load_s:.1f} s, lanes: {hosts.have_lanes}", flush=True)
        found["workers"] = {"load_s": load_s, "have_lanes": hosts.have_lanes, "about": hosts.about, "fleets": {}}
        cycles = setup.cycles
        for way, batches in (("workers", None), ("workers, matched", _RANGE)):
            for name, slowdowns in FLEETS.items():
                devices = fleet(whole, SIZES, slowdowns, setup.samples)
                print(f"  {way}, {name}", flush=True)
                found["workers"]["fleets"].setdefault(name, {})[way] = through_workers(
                    whole, replace(setup, cycles=cycles), rows, devices, hosts, batches
                )
                cycles = max(_COUNTED + 2, setup.cycles - 2)  # graphs and lanes are there by then
                show(f"{whole.name}, {way}", name, found["workers"]["fleets"][name][way])


def through_workers(
    whole: Mix,
    setup: Setup,
    rows: Rows,
    devices: Sequence[Device],
    hosts: Workers,
    batches: tuple[float, float] | None,
) -> dict[str, Any]:
    """Cycles through the device processes, against the baselines."""
    rules = federation(whole, "shortest", setup.epochs, setup.levels)
    did = run_workers(with_ranges(rules, *batches) if batches else rules, devices, hosts, setup.cycles)
    result = compare(rows, did.run.cycles[-_COUNTED:], devices)
    result["ours"] = {
        "cycle_s": [cycle.cycle_s for cycle in did.run.cycles],
        "cycle_with_exchange_s": did.whole_s,
        "samples_per_s": [sum(cycle.throughputs()) for cycle in did.run.cycles],
        "idle_part": [cycle.idle_part for cycle in did.run.cycles],
        "residual": [each.mismatch for each in did.run.figures.cycles],
        "shares": did.run.shares,
        "in_turn": did.in_turn,
        "batches": did.batches,
    }
    return result


def load(played: Fleet, setup: Setup) -> None:
    """Load the trainings of a mix; bare graphs in lanes where carpool's trainer cannot be loaded."""
    began = time.monotonic()
    played.plain.invite(played.whole.at(PLAIN), deterministic=False)
    for played.ours in (True, False):
        guests = [guest for level in {*setup.equal, 100} for guest in played.whole.at(level, ours=played.ours)]
        try:
            played.lanes.invite(guests, deterministic=True)
            break
        except Gone as gone:
            print(f"  {gone}", flush=True)
    print(f"{played.whole.name}: loaded in {time.monotonic() - began:.1f} s", flush=True)


def show(mix_name: str, fleet_name: str, result: Mapping[str, Any]) -> None:
    """Print the rows of a fleet."""
    ours = result["ours"]
    print(f"{mix_name}, {fleet_name}")
    for row in result["baselines"]:
        print(
            f"  {row['group']:7} {row['plan']:13} {row['name']:13} {row['cycle_s']:7.3f} s, "
            f"{row['samples_per_s']:9,.0f} samples/s, idle {row['idle_part']:4.0%}; ours: average x "
            f"{row['average']:5.2f}, fairness x {row['fairness']:5.2f}"
        )
    cycles = " ".join(f"{seconds:.3f}" for seconds in ours["cycle_s"])
    print(f"  ours: cycles {cycles} s, {ours['samples_per_s'][-1]:,.0f} samples/s, idle {ours['idle_part'][-1]:.0%}")
    for name, shares in ours["shares"].items():
        print(f"    {name}: " + "/".join(f"{share:.0%}" for share in shares))
    for plan, groups in result["against_best"].items():
        for group, values in groups.items():
            least, target = min(values.values()), TARGETS[group]
            print(
                f"  best of {group:6} with {plan:12}: average x {values['average']:.2f}, "
                f"fairness x {values['fairness']:.2f} (target {target}): {'ok' if least >= target else 'MISSED'}",
                flush=True,
            )


def main() -> None:
    """Mix by mix, as long as there is time; what was measured is saved in any case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--mixes", default="", help="only mixes whose names begin so, divided by commas")
    parser.add_argument("--epochs", type=float, default=0.5, help="per cycle, of all data")
    parser.add_argument("--seconds", type=float, default=0.4, help="of a window that measures rates")
    parser.add_argument("--cycles", type=int, default=6, help="of ours; the last two count")
    parser.add_argument("--limit", type=float, default=200.0, help="seconds on seats")
    parser.add_argument("--worker-limit", type=float, default=300.0, help="seconds through device processes")
    parser.add_argument("--name", default="federated_gpu", help="of the result file")
    given = parser.parse_args()
    signal.signal(signal.SIGALRM, _out_of_time)
    signal.setitimer(signal.ITIMER_REAL, given.limit)
    torch.set_num_threads(1)
    setup = Setup(given.epochs, given.seconds, 0.25, given.cycles, LEVELS, EQUAL)
    mixes = [whole for whole in MIXES if whole.name.startswith(tuple(given.mixes.split(",")))]
    if given.device != "cuda":
        mixes = [tiny(whole) for whole in mixes]
        setup = Setup(0.1, 0.05, 0.5, given.cycles, LEVELS[1::2], EQUAL[:2], samples=2_000)
    results: dict[str, Any] = {"device": given.device, "epochs": setup.epochs, "sizes": SIZES, "mixes": {}}
    rows: dict[str, Rows] = {}
    try:
        with mps() as environment, Room({}, given.device) as plain, Room(environment, given.device) as lanes:
            measure(mixes, (plain, lanes), setup, results, given, rows)
    except OutOfTime:
        print("out of time on seats", flush=True)
    signal.setitimer(signal.ITIMER_REAL, given.worker_limit)
    try:
        for whole in [whole for whole in mixes if whole.name in rows]:
            measure_workers(whole, setup, rows[whole.name], given.device, results["mixes"][whole.name])
            save(given.name, results)
    except OutOfTime:
        print("out of time on workers")
    except CarpoolError as error:
        print(f"workers: {error}")
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    print(f"saved to {save(given.name, results)}")


def measure(
    mixes: Sequence[Mix],
    rooms: tuple[Room, Room],
    setup: Setup,
    results: dict[str, Any],
    given: argparse.Namespace,
    rows: dict[str, Rows],
) -> None:
    """All mixes that there is time for; one that fails is recorded, and the others go on."""
    began = time.monotonic()
    longest = 0.0
    for whole in mixes:
        now = time.monotonic()
        if now - began + longest > given.limit:
            print(f"no time for {whole.name}")
            return
        found: dict[str, Any] = {}
        results["mixes"][whole.name] = found
        try:
            rows[whole.name] = measure_mix(rooms, whole, setup, found)
        except Gone as gone:
            found["error"] = str(gone)
            print(f"{whole.name}: {gone}", flush=True)
        took_s = found["seconds"] = time.monotonic() - now
        longest = max(longest, took_s)
        print(f"{whole.name}: {took_s:.0f} s", flush=True)
        save(given.name, results)


def _out_of_time(number: int, frame: object) -> NoReturn:
    raise OutOfTime


if __name__ == "__main__":
    main()
