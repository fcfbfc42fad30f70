"""Measures time slicing under a memory cap: gaps, memory in use, and equality of weights.

Usage: PYTHONPATH=src python benchmarks/gpu_memory.py [--cases eight,two,three:03] [--reference] [--out FILE]

All jobs run to their end through an executor. A thread asks the driver every 5 ms for the memory in use. Gaps are
stamped on the device (trials/timed.py). The cap includes CUDA contexts. `--parked` names models that are parked and
swapped in where there is room (trials/parked.py). With `--reference` all jobs run once without a cap, and weights must
be equal. `copies_ms` is the copy time of a parked job's weights and state at the measured rate; `parked`, where two
jobs do not fit together, compares the gap with the bytes to move. `--devices cpu:1x1 --cases tiny` tries it without a
GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from gpu_switching import program
from measured import RESULTS, conditions
from trials.baselines import parked_ms
from trials.copying import copy_rates
from trials.desk import Desk
from trials.gaps import gaps_ms, spread
from trials.gpu import open_desk
from trials.timed import read

_GIB = 1 << 30
_WARM = 20  # steps: more than a first turn, in which a job is measured
Way = tuple[bool, bool]  # speculates, leaves early


@dataclass(frozen=True, slots=True)
class Case:
    """Some jobs under a cap."""

    models: tuple[str, ...]  # with the samples of a batch behind a colon
    cap: int  # bytes
    quantum_s: float
    ways: tuple[Way, ...] = ((True, True),)


def steps_of(model: str) -> int:
    """How many steps a job makes: the same in all cases, so that weights can be compared."""
    return 160 if model.startswith("vgg") else 100


_ABLATION = ((True, True), (True, False), (False, True), (False, False))
_EIGHT = ("vgg16:128", "vgg19:128", "vgg16:120", "resnet50:128", "resnet101:128", "densenet121:128", "bert_base:8")
CASES = {
    "tiny": Case(("mlp:4", "mlp:5", "cnn:4"), 14 << 20, 0.0, _ABLATION),
    # Two of them fit wholly, the third one's state does not: its copies have to hide behind the others' turns.
    "three": Case(("vgg16:128", "vgg19:128", "vgg16:120"), int(8.75 * _GIB), 0.06, _ABLATION),
    # Both states fit, but one scratch: the next job's goes into what the one before has released. Where nothing is kept
    # or brought in on speculation, every switch finds the next job parked, and nothing hides that.
    "two": Case(("vgg16:128", "vgg19:128"), 7 * _GIB, 0.02, _ABLATION),
    "eight": Case((*_EIGHT, "mobilenet_v3:128"), 16 * _GIB, 0.05),
}


PARKED = "vgg16:128,resnet50:128,bert_base:8,mobilenet_v3:128"


class Watch(threading.Thread):
    """How much of the device is taken at most, and how often that was over the cap."""

    def __init__(self, devices: str, cap: int) -> None:
        super().__init__(daemon=True)
        self._cuda = devices.startswith("cuda")
        self._cap = cap
        self._over = threading.Event()
        self._before = self._used() if self._cuda else 0  # our own context, which is no job's
        self.samples = self.above = self.peak = 0

    def run(self) -> None:
        """Look again and again."""
        while self._cuda and not self._over.wait(0.005):
            used = self._used() - self._before
            self.samples += 1
            self.peak = max(self.peak, used)
            self.above += used > self._cap

    def stop(self) -> dict[str, Any]:
        """What was seen."""
        self._over.set()
        self.join()
        return {"samples": self.samples, "peak_gib": round(self.peak / _GIB, 3), "samples_above_cap": self.above}

    def _used(self) -> int:
        free, total = torch.cuda.mem_get_info(0)
        return total - free


@dataclass(frozen=True, slots=True)
class Row:
    """Jobs to be run one way, or without a cap."""

    name: str
    models: tuple[str, ...]
    case: Case
    way: Way | None
    folder: Path

    async def opened(self, devices: str) -> Desk:
        """An executor for it."""
        await asyncio.to_thread(self.folder.mkdir)
        how: dict[str, Any] = {"quantum_s": self.case.quantum_s}
        if self.way is not None:
            how |= {"memory_cap": self.case.cap, "speculates": self.way[0], "leaves_early": self.way[1]}
        return await open_desk(self.folder, devices=devices, mps=False, patience_s=100.0, mirror_s=1e6, **how)


async def run(desk: Desk, row: Row, devices: str) -> dict[str, Any]:
    """Run the jobs of a row to their ends; those of one model are told apart by their batch."""
    models, way, folder = row.models, row.way, row.folder
    watch = Watch(devices, row.case.cap)
    watch.start()
    began = time.monotonic()
    try:
        for model in models:
            desk.introduce(model, program(model, steps_of(model), folder / model))
            desk.assign(model, 0, fraction=1.0 / len(models))
        digests = {model: await desk.end_of(model) for model in models}
    finally:
        await desk.close()
        memory = watch.stop()
        print("# " + "; ".join(f"{job}: {words}" for job, story in desk.stories.items() for words in story), flush=True)
    turns, hits = 0, 0
    for story in desk.stories.values():
        for words in story:
            if found := re.search(r"had (\d+) turns under the memory cap, (\d+)", words):
                turns, hits = turns + int(found[1]), hits + int(found[2])
    gaps = gaps_ms({model: read(folder / model) for model in models if (folder / model).exists()}, _WARM)
    return {
        "speculates": way and way[0],
        "leaves_early": way and way[1],
        "seconds": round(time.monotonic() - began, 2),
        "failures": {model: digest for model, digest in digests.items() if digest.startswith("FAILED")},
        "gap_ms": {model: spread(each) for model, each in gaps.items()},
        "all_gaps_ms": spread([gap for each in gaps.values() for gap in each]),
        "gaps_above_1_ms": sum(gap > 1.0 for each in gaps.values() for gap in each),
        "hit_rate": round(hits / turns, 3) if turns else None,
        "memory": memory,
        "stories": {
            job: words for job, story in desk.stories.items() for words in story if "state swapped out" in words
        },
        "digests": digests,
    }


def copies_ms(stories: dict[str, str], rates: dict[str, float]) -> dict[str, dict[str, float]]:
    """For each job, how long its weights and its whole state take in at the measured rate."""
    found = {}
    for job, words in stories.items():
        if rates and (sizes := re.search(r"state of (\d+) MB \((\d+) of them weights", words)):
            whole, weights = (1e3 * 1e6 * int(size) / rates["in"] for size in sizes.groups())
            found[job] = {"weights": round(weights, 2), "state": round(whole, 2)}
    return found


def parked(gaps: dict[str, dict[str, float]], copies: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """For two jobs that do not fit together: the gap beside the bytes that have to be moved at the measured rate.

    These are the one state that has to go before there is room, and the other one that comes into it.
    """
    moved = round(sum(each["state"] for each in copies.values()), 2)
    found = {job: gap["median"] for job, gap in gaps.items() if gap["count"]}
    return {job: {"gap_ms": gap, "moved_ms": moved, "ratio": round(gap / moved, 3)} for job, gap in found.items()}


class Table:
    """Rows, written down after each."""

    def __init__(self, path: Path, devices: str) -> None:
        self._path = path
        self._rates = copy_rates() if devices.startswith("cuda") else {}
        self._head = {"schema": 1, "benchmark": "gpu_memory", **conditions(), "devices": devices}
        self._rows: list[dict[str, Any]] = []
        self._wanted: dict[str, str] = {}  # digests without a cap
        self._devices = devices
        print(f"# copies, bytes per second: {self._rates}", flush=True)

    def park(self, models: Sequence[str]) -> None:
        """Park jobs one by one."""
        for model, row in parked_ms(models).items():
            self._add({"case": "parked", "jobs": [model], **row})

    async def run(self, rows: Sequence[Row]) -> None:
        """Run one row after another; what takes a cap is compared with those before it that have none."""
        desks = await asyncio.gather(*[row.opened(self._devices) for row in rows])
        for row, desk in zip(rows, desks, strict=True):
            await self._run(row, desk)

    async def _run(self, row: Row, desk: Desk) -> None:
        cap = None if row.way is None else round(row.case.cap / _GIB, 3)
        made: dict[str, Any] = {"case": row.name, "cap_gib": cap, "jobs": list(row.models)}
        try:
            made |= await run(desk, row, self._devices)
        except Exception as error:  # noqa: BLE001 - the others go on
            made["error"] = f"{type(error).__name__}: {error}"
        digests = made.get("digests", {})
        if row.way is None:
            self._wanted |= digests
        elif self._wanted:
            made["equal_to_uncapped"] = bool(digests) and all(self._wanted.get(job) == digests[job] for job in digests)
        if expected := copies_ms(made.get("stories", {}), self._rates):
            made["copies_ms"] = expected
        if len(row.models) == len(expected) == 2 and row.way is not None and not row.way[0]:
            made["parked"] = parked(made["gap_ms"], expected)
        self._add(made)

    def _add(self, row: dict[str, Any]) -> None:
        self._rows.append(row)
        print(json.dumps(row), flush=True)
        document = {**self._head, "copy_rates": self._rates, "results": self._rows}
        self._path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Every case, every way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cases",
        default="eight,two,three",
        help="with rows of the ablation behind a colon: three:03 is with all and nothing",
    )
    parser.add_argument("--cap", type=float, default=0.0, help="GiB, instead of the cases' own caps")
    parser.add_argument("--parked", default=PARKED, help="models to park where there is room for them")
    parser.add_argument("--reference", action="store_true", help="first without a cap: the weights must be the same")
    parser.add_argument("--devices", default="cuda:0")
    parser.add_argument("--out", default="", help=f"write JSON here instead of {RESULTS.name}/gpu_memory.json")
    options = parser.parse_args()
    table = Table(Path(options.out) if options.out else RESULTS / "gpu_memory.json", options.devices)
    if options.parked and options.devices.startswith("cuda"):
        table.park(options.parked.split(","))
    chosen = [name.partition(":") for name in options.cases.split(",") if name]
    ways = {name: rows for name, _, rows in chosen}
    cases = {name: replace(CASES[name], cap=int(options.cap * _GIB) or CASES[name].cap) for name in ways}
    with tempfile.TemporaryDirectory() as folder:
        rows = []
        if options.reference:
            every = dict.fromkeys(model for case in cases.values() for model in case.models)
            rows.append(Row("without a cap", tuple(every), next(iter(cases.values())), None, Path(folder) / "without"))
        for name, case in cases.items():
            for number, way in enumerate(case.ways):
                if not ways[name] or str(number) in ways[name]:
                    rows.append(Row(name, case.models, case, way, Path(folder) / f"{name}{number}"))
        asyncio.run(table.run(rows))


if __name__ == "__main__":
    main()
