"""Measures how well step times are predicted on devices where a training never ran.

Usage: PYTHONPATH=src python benchmarks/throughput.py [--data DIR] [--seeds N]

First Pollux's profiles: six applications on 108 placements over up to four nodes of four devices, all seen alone on
one device and on some placements, and predicted on the others. Then generated clusters (`wiring`): nodes with NVLink,
PCIe or both, joined by Ethernet, where one to four synthetic trainings run at once and every transfer is simulated
with max-min fair links; a third of the groups is held out.

MAPE is the mean of |predicted / measured - 1| of step times: over held-out settings of a training, then over trainings.
Intervals are 95 % (Student's t) over seeds. Exits with 1 when a limit is missed. About five minutes.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable, Iterator, Sequence
from math import log, sqrt
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
from measured import ROOT, save
from scipy.stats import t as student
from wiring import laws
from wiring.machines import Machines, Placed, draw, trainings

from carpool.core.topology import Cluster
from carpool.predictors.links.fabric import Fabric
from carpool.predictors.links.layout import PlacedTraining
from carpool.predictors.links.throughput import Throughput
from carpool.predictors.loss.goodput import Sample, ThroughputModel

APPLICATIONS = ("bert", "cifar10", "deepspeech2", "imagenet", "ncf", "yolov3")
SEEN = (10, 20, 54)  # placements, beside one device alone
LIMITS = {"pollux": 0.10, "generated": 0.15}
GROUPS, HELD_OUT = 90, 30


class Seen(NamedTuple):
    """One measured step of a member of a group."""

    group: tuple[PlacedTraining, ...]
    place: int
    seconds: float
    sync_s: float | None = None

    @property
    def runner(self) -> PlacedTraining:
        """Whose step it is."""
        return self.group[self.place]


Method = Callable[[Fabric, Sequence[Seen], Sequence[Seen]], Sequence[float]]


# ---------------------------------------------------------------------------------------------------------- methods
def _learned(seen: Sequence[Seen], model: Throughput) -> Throughput:
    groups = list(dict.fromkeys(each.group for each in seen))
    known = {(each.group, each.place): each.seconds for each in seen}
    whole = [group for group in groups if all((group, place) in known for place in range(len(group)))]
    return model.fit(whole, [[known[group, place] for place in range(len(group))] for group in whole])


def ours(fabric: Fabric, seen: Sequence[Seen], asked: Sequence[Seen]) -> list[float]:
    """All there is."""
    answers = _learned(seen, Throughput(fabric)).predict([each.group for each in asked])
    return [found[each.place].mean for each, found in zip(asked, answers, strict=True)]


def formulas(fabric: Fabric, seen: Sequence[Seen], asked: Sequence[Seen]) -> list[float]:
    """Without what is learned of single trainings beyond the formulas."""
    answers = _learned(seen, Throughput(fabric, habits=False)).predict([each.group for each in asked])
    return [found[each.place].mean for each, found in zip(asked, answers, strict=True)]


def as_if_alone(fabric: Fabric, seen: Sequence[Seen], asked: Sequence[Seen]) -> list[float]:
    """As if nobody else used the links."""
    answers = _learned(seen, Throughput(fabric)).predict([[each.runner] for each in asked])
    return [found[0].mean for found in answers]


def pollux_form(fabric: Fabric, seen: Sequence[Seen], asked: Sequence[Seen]) -> list[float]:
    """Pollux's throughput model (OSDI'21), our re-implementation, fitted to each training by itself.

    Where synchronisation was not measured it is what a step takes beyond the quickest with as many samples.
    """
    models: dict[str, ThroughputModel] = {}
    for name in {each.runner.model for each in seen}:
        mine = [each for each in seen if each.runner.model == name]
        quickest: dict[float, float] = {}
        for each in mine:
            samples = each.runner.samples[0]
            quickest[samples] = min(each.seconds, quickest.get(samples, each.seconds))
        rows = []
        for each in mine:
            sync_s = each.seconds - quickest[each.runner.samples[0]] if each.sync_s is None else each.sync_s
            samples = int(each.runner.samples[0])
            rows.append(Sample(_nodes(fabric, each), len(each.runner.devices), samples, each.seconds, sync_s))
        models[name] = ThroughputModel().fit(rows)
    found = []
    for each in asked:
        count, several = float(len(each.runner.devices)), np.array([_nodes(fabric, each) > 1])
        micro = np.array([each.runner.samples[0]])
        found.append(float(models[each.runner.model].step_s(several, np.array([count]), micro, np.zeros(1))[0]))
    return found


def nearest(fabric: Fabric, seen: Sequence[Seen], asked: Sequence[Seen]) -> list[float]:
    """The step measured under the likest conditions: devices, places, samples."""
    known: dict[str, tuple[Any, list[float]]] = {}
    for name in {each.runner.model for each in seen}:
        mine = [each for each in seen if each.runner.model == name]
        known[name] = np.array([_traits(fabric, each) for each in mine]), [each.seconds for each in mine]
    found = []
    for each in asked:
        rows, seconds = known[each.runner.model]
        found.append(seconds[int(np.abs(rows - _traits(fabric, each)).sum(axis=1).argmin())])
    return found


def _traits(fabric: Fabric, each: Seen) -> list[float]:
    """Placements count more than samples."""
    width = len(each.runner.devices)
    return [2.0 * log(width), 2.0 * log(_nodes(fabric, each)), log(each.runner.samples[0])]


def linear(fabric: Fabric, seen: Sequence[Seen], asked: Sequence[Seen]) -> list[float]:
    """Throughput in proportion to the devices: a step takes as long as on one."""
    alone = [each for each in seen if len(each.runner.devices) == 1]
    return nearest(fabric, alone, asked)


METHODS: dict[str, Method] = {
    "ours": ours,
    "ours, formulas only": formulas,
    "Pollux's form, re-implemented": pollux_form,
    "nearest placement seen": nearest,
    "linear in devices": linear,
}


def _nodes(fabric: Fabric, each: Seen) -> int:
    return len({fabric.host(device) for device in each.runner.devices})


def mape(asked: Sequence[Seen], answers: Sequence[float]) -> dict[str, float]:
    """By training, and the mean of these."""
    errors: dict[str, list[float]] = {}
    for each, answer in zip(asked, answers, strict=True):
        errors.setdefault(each.runner.model, []).append(abs(answer / each.seconds - 1.0))
    found = {name: float(np.mean(values)) for name, values in sorted(errors.items())}
    return {"mean": float(np.mean(list(found.values()))), **found}


# ----------------------------------------------------------------------------------------------------------- Pollux
POLLUX = Cluster.build([(16, 4, "T4")])


def _spot(name: str, counts: Sequence[int], samples: int, step_s: float, sync_s: float) -> Seen:
    devices = tuple([4 * node + place for node, number in enumerate(counts) for place in range(number)])
    width = len(devices)
    return Seen((PlacedTraining(name, devices, ("T4",) * width, (float(samples),) * width),), 0, step_s, sync_s)


def _table(folder: Path, name: str) -> Iterator[tuple[str, Seen]]:
    with (folder / name / "placements.csv").open(encoding="utf-8") as stream:
        for row in csv.DictReader(stream):
            counts = [int(digit) for digit in row["placement"]]
            times = float(row["step_time"]), float(row["sync_time"])
            yield row["placement"], _spot(name, counts, int(row["local_bsz"]), *times)


def _wider(folder: Path, name: str) -> Iterator[Seen]:
    """More nodes than any of the placements has; those with as many devices on each."""
    with (folder / name / "scalability.csv").open(encoding="utf-8") as stream:
        for row in csv.DictReader(stream):
            nodes, width = int(row["num_nodes"]), int(row["num_replicas"])
            if width % nodes == 0 and width // nodes <= 4:
                times = float(row["step_time"]), float(row["sync_time"])
                yield _spot(name, [width // nodes] * nodes, int(row["local_bsz"]), *times)


def on_pollux(folder: Path, seeds: int) -> list[dict[str, Any]]:
    """Every number of placements seen, then more nodes than ever seen."""
    fabric = Fabric.of(POLLUX)
    tables = {name: list(_table(folder, name)) for name in APPLICATIONS}
    placements = sorted({placement for placement, _ in tables["cifar10"]} - {"1"})
    wider = [each for name in APPLICATIONS for each in _wider(folder, name)]
    rows = []
    for number in SEEN:
        for method, answer in METHODS.items():
            errors, beyond = [], []
            for seed in range(seeds):
                chosen = {"1", *np.random.default_rng(seed).permutation(placements)[:number].tolist()}
                seen = [each for table in tables.values() for placement, each in table if placement in chosen]
                asked = [each for table in tables.values() for placement, each in table if placement not in chosen]
                answers = answer(fabric, seen, [*asked, *wider])
                errors.append(mape(asked, answers[: len(asked)]))
                beyond.append(mape(wider, answers[len(asked) :])["mean"])
            rows.append(_row(f"{number} of 108 placements seen", method, errors, wider_than_seen=_interval(beyond)))
    return rows


# -------------------------------------------------------------------------------------------------------- generated
def on_generated(seeds: int) -> list[dict[str, Any]]:
    """Clusters with mixed links; known trainings in groups never seen."""
    laws.check()
    clusters = []
    for seed in range(seeds):
        machines, made, random = Machines(seed), trainings(seed), Random(f"draw {seed}")
        drawn = [draw(machines, made, random) for _ in range(GROUPS)]
        kinds = dict.fromkeys(machines.kinds)
        alone = [
            [Placed(each, (machines.kinds.index(kind),), size)]
            for each in made
            for kind in kinds
            for size in (8.0, 32.0)
        ]
        measured = [_measured(machines, placed, number) for number, placed in enumerate([*alone, *drawn])]
        seen = [each for group in measured[:-HELD_OUT] for each in group]
        asked = [each for group in measured[-HELD_OUT:] for each in group]
        clusters.append(Generated(machines, seen, asked))
        print(f"  cluster {seed}: {len(machines.kinds)} devices, {len(seen)} steps seen", flush=True)
    rows = []
    for method, answer in {**METHODS, "ours, as if alone on the links": as_if_alone}.items():
        errors = [{"mean": each.error(answer)} for each in clusters]
        rows.append(_row("groups never seen, several devices", method, errors))
    for method, answer in {"ours": ours, "linear in devices": linear}.items():
        errors = [{"mean": each.error_of_newcomers(answer)} for each in clusters]
        rows.append(_row("trainings seen on one device only", method, errors))
    rows.append(_speeds(clusters))
    return rows


class Generated(NamedTuple):
    """A cluster with measured groups."""

    machines: Machines
    seen: Sequence[Seen]
    asked: Sequence[Seen]

    def error(self, answer: Method) -> float:
        """On what was held out."""
        asked = [each for each in self.asked if len(each.runner.devices) > 1]
        return mape(asked, answer(self.machines.fabric, self.seen, asked))["mean"]

    def error_of_newcomers(self, answer: Method) -> float:
        """On each training in turn, of which only steps alone on one device were seen."""
        found = []
        for name in sorted({each.runner.model for each in self.asked}):
            seen = [each for each in self.seen if len(each.group) == len(each.runner.devices) == 1]
            others = [each for each in self.seen if all(runner.model != name for runner in each.group)]
            asked = [each for each in self.asked if each.runner.model == name and len(each.runner.devices) > 1]
            if asked:
                known = list(dict.fromkeys([*seen, *others]))
                found.append(mape(asked, answer(self.machines.fabric, known, asked))["mean"])
        return float(np.mean(found))


def _measured(machines: Machines, placed: Sequence[Placed], seed: int) -> list[Seen]:
    group = tuple(
        [
            PlacedTraining(
                each.made.name,
                each.devices,
                tuple([machines.kinds[device] for device in each.devices]),
                (each.samples,) * len(each.devices),
                each.made.gradient_bytes,
                each.made.input_bytes,
                each.made.exchange,
            )
            for each in placed
        ]
    )
    return [Seen(group, place, seconds) for place, seconds in enumerate(machines.measure(placed, seed))]


def _speeds(clusters: Sequence[Generated]) -> dict[str, Any]:
    """Learned over true speed of each kind of link."""
    ratios: dict[str, list[float]] = {}
    for machines, seen, _ in clusters:
        for kind, speed in _learned(seen, Throughput(machines.fabric)).link_speeds().items():
            ratios.setdefault(kind, []).append(float(speed / np.exp(machines.speeds[kind])))
    told = {kind: round(float(np.exp(np.mean(np.log(found)))), 3) for kind, found in ratios.items()}
    print(f"  learned over true link speed, geometric mean: {told}", flush=True)
    return {"setting": "learned over true link speed, geometric mean", **told}


# ---------------------------------------------------------------------------------------------------------- telling
def _interval(values: Sequence[float]) -> dict[str, float]:
    """Mean and half the width of its 95 % interval."""
    wide = float(student.ppf(0.975, len(values) - 1)) * float(np.std(values, ddof=1)) / sqrt(len(values))
    return {"mape": round(float(np.mean(values)), 4), "within": round(wide, 4)}


def _row(setting: str, method: str, errors: Sequence[dict[str, float]], **more: Any) -> dict[str, Any]:
    by_training = {name: round(float(np.mean([each[name] for each in errors])), 4) for name in errors[0]}
    row = {"setting": setting, "method": method, **_interval([each["mean"] for each in errors]), **more}
    if len(by_training) > 1:
        row["by_training"] = {name: value for name, value in by_training.items() if name != "mean"}
    beside = "".join(f"; wider than seen {found['mape']:.1%}" for found in more.values())
    print(f"  {setting:38} {method:32} {row['mape']:7.1%} +/- {row['within']:.1%}{beside}", flush=True)
    return row


def main() -> int:
    """Both halves."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data", help="folder that holds pollux/")
    parser.add_argument("--seeds", type=int, default=5, help="at least 2")
    options = parser.parse_args()
    results: dict[str, Any] = {}
    if (options.data / "pollux" / "profiles").is_dir():
        print("Pollux's profiles, MAPE on placements never seen")
        results["pollux"] = on_pollux(options.data / "pollux" / "profiles", options.seeds)
    else:
        print(f"There is no {options.data / 'pollux' / 'profiles'}: left out. Name the folder with --data.")
    print("Generated clusters, every transfer simulated")
    results["generated"] = on_generated(options.seeds)
    missed = [
        f"{ground}, {row['setting']}: {row['mape']:.1%}, limit {LIMITS[ground]:.0%}"
        for ground, rows in results.items()
        for row in rows
        if row.get("method") == "ours" and row["mape"] > LIMITS[ground]
    ]
    for words in missed:
        print(f"MISSED {words}")
    print(save("throughput", {**results, "missed": missed}))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
