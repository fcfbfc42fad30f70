"""Jobs that take turns under a memory cap: what parking, prefetching and early release bring, and whether it holds.

Usage: PYTHONPATH=src python benchmarks/gpu_memory.py [--cases three,two,eight] [--reference] [--out FILE]
All jobs run through an executor to their ends. A thread asks the driver every 5 ms how much of the GPU is taken. Gaps
are stamped on the device (trials/timed.py). The cap counts everything on the GPU, processes' own contexts included.
`--parked` names models that are parked and brought back where there is room for them (trials/parked.py).
With `--reference` all jobs run once without a cap: the weights must be the same, and the memory they take is shown.
`copies_ms` is what a parked job's weights, and its whole state, take at the measured rate; `parked`, where two jobs do
not fit beside each other, compares the gap with what has to be moved in it.
`--devices cpu:1x1 --cases tiny` tries it without a GPU.
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
    # Nothing is kept or brought in on speculation: every switch finds the next job parked, and nothing hides that.
    "two": Case(("vgg16:128", "vgg19:128"), 7 * _GIB, 0.02, ((False, True),)),
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


async def run(models: Sequence[str], case: Case, way: Way | None, folder: Path, devices: str) -> dict[str, Any]:
    """One way, or without a cap; jobs of one model are told apart by their batch."""
    watch = Watch(devices, case.cap)
    watch.start()
    how: dict[str, Any] = {"quantum_s": case.quantum_s}
    if way is not None:
        how |= {"memory_cap": case.cap, "speculates": way[0], "leaves_early": way[1]}
    began = time.monotonic()
    desk = await open_desk(folder, devices=devices, mps=False, patience_s=100.0, mirror_s=1e6, **how)
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
            if found := re.search(r"came to (\d+) turns under the memory cap, (\d+)", words):
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
        "stories": {job: words for job, story in desk.stories.items() for words in story if "left the device" in words},
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

    def reference(self, models: Sequence[str], case: Case) -> None:
        """Run jobs without a cap; what others take with one is compared with it."""
        row = self._run("without a cap", models, case, None)
        self._wanted = row.get("digests", {})

    def case(self, name: str, case: Case, ways: Sequence[Way]) -> None:
        """Run a case each way."""
        for way in ways:
            self._run(name, case.models, case, way)

    def _run(self, name: str, models: Sequence[str], case: Case, way: Way | None) -> dict[str, Any]:
        cap = None if way is None else round(case.cap / _GIB, 3)
        row: dict[str, Any] = {"case": name, "cap_gib": cap, "jobs": list(models)}
        with tempfile.TemporaryDirectory() as folder:
            try:
                row |= asyncio.run(run(models, case, way, Path(folder), self._devices))
            except Exception as error:  # noqa: BLE001 - the others go on
                row["error"] = f"{type(error).__name__}: {error}"
        digests = row.get("digests", {})
        if way is not None and self._wanted:
            row["equal_to_uncapped"] = bool(digests) and all(self._wanted.get(job) == digests[job] for job in digests)
        if expected := copies_ms(row.get("stories", {}), self._rates):
            row["copies_ms"] = expected
        if len(models) == len(expected) == 2:
            row["parked"] = parked(row["gap_ms"], expected)
        self._add(row)
        return row

    def _add(self, row: dict[str, Any]) -> None:
        self._rows.append(row)
        print(json.dumps(row), flush=True)
        document = {**self._head, "copy_rates": self._rates, "results": self._rows}
        self._path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Every case, every way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="three,two,eight")
    parser.add_argument("--ways", default="0,1,2,3", help="of the ablation: which of its four rows")
    parser.add_argument("--cap", type=float, default=0.0, help="GiB, instead of the cases' own caps")
    parser.add_argument("--parked", default=PARKED, help="models to park where there is room for them")
    parser.add_argument("--reference", action="store_true", help="first without a cap: the weights must be the same")
    parser.add_argument("--devices", default="cuda:0")
    parser.add_argument("--out", default="", help=f"write JSON here instead of {RESULTS.name}/gpu_memory.json")
    options = parser.parse_args()
    table = Table(Path(options.out) if options.out else RESULTS / "gpu_memory.json", options.devices)
    if options.parked and options.devices.startswith("cuda"):
        table.park(options.parked.split(","))
    cases = {name: CASES[name] for name in options.cases.split(",") if name}
    if options.reference:
        every = dict.fromkeys(model for case in cases.values() for model in case.models)
        table.reference(list(every), next(iter(cases.values())))
    for name, case in cases.items():
        wanted = [int(way) for way in options.ways.split(",")]
        chosen = replace(case, cap=int(options.cap * _GIB) or case.cap)
        table.case(name, chosen, [way for number, way in enumerate(case.ways) if number in wanted])


if __name__ == "__main__":
    main()
