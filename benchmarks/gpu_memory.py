"""Jobs that take turns under a memory cap: what parking, prefetching and early release bring, and whether it holds.

Usage: PYTHONPATH=src python benchmarks/gpu_memory.py [--out FILE]
All jobs run through an executor to their ends. A thread asks the driver every 5 ms how much of the GPU is taken. Gaps
are stamped on the device (trials/timed.py). The cap counts everything on the GPU, processes' own contexts included.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_switching import gaps_ms, program, spread
from measured import RESULTS, conditions
from trials.gpu import open_desk
from trials.timed import read

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Case:
    """Some jobs under a cap."""

    models: tuple[str, ...]  # with the samples of a batch behind a colon
    cap: int  # bytes
    steps: int
    quantum_s: float
    options: tuple[tuple[bool, bool], ...] = ((True, True),)  # speculates, leaves early


_ABLATION = ((True, True), (True, False), (False, True), (False, False))
_EIGHT = ("vgg16:128", "vgg19:128", "resnet50:128", "resnet101:128", "densenet121:128", "bert_base:8", "resnet18:128")
CASES = {
    "tiny": Case(("mlp:4", "mlp:5", "cnn:4"), 14 << 20, 100, 0.0, _ABLATION),
    # Two of them fit wholly, the third one's state does not: its copies have to hide behind the others' turns.
    "three": Case(("vgg16:128", "vgg19:128", "vgg16:120"), int(8.75 * _GIB), 200, 0.1, _ABLATION),
    # One fits: every switch copies one state out and another in, and nothing hides it.
    "two": Case(("vgg16:128", "vgg19:128"), 7 * _GIB, 60, 0.02),
    "eight": Case((*_EIGHT, "mobilenet_v3:128"), 16 * _GIB, 120, 0.05),
}


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


async def run(case: Case, way: tuple[bool, bool] | None, folder: Path, devices: str) -> dict[str, Any]:
    """One way, or without a cap; jobs of one model are told apart by their batch."""
    watch = Watch(devices, case.cap)
    watch.start()
    how: dict[str, Any] = {"quantum_s": case.quantum_s}
    if way is not None:
        how |= {"memory_cap": case.cap, "speculates": way[0], "leaves_early": way[1]}
    began = time.monotonic()
    desk = await open_desk(folder, devices=devices, mps=False, patience_s=120.0, mirror_s=1e6, **how)
    try:
        for model in case.models:
            desk.introduce(model, program(model, case.steps, folder / model))
            desk.assign(model, 0, fraction=1.0 / len(case.models))
        digests = {model: await desk.end_of(model) for model in case.models}
    finally:
        await desk.close()
    turns, hits = 0, 0
    for story in desk.stories.values():
        for words in story:
            if found := re.search(r"came to (\d+) turns under the memory cap, (\d+)", words):
                turns, hits = turns + int(found[1]), hits + int(found[2])
    failures = {model: digest for model, digest in digests.items() if digest.startswith("FAILED")}
    if failures:
        print(json.dumps({model: story for model, story in desk.stories.items() if model in failures}), flush=True)
    found_gaps = gaps_ms({m: read(folder / m) for m in case.models if (folder / m).exists()}) if not failures else {}
    return {
        "speculates": way and way[0],
        "leaves_early": way and way[1],
        "seconds": round(time.monotonic() - began, 2),
        "failures": failures,
        "gap_ms": {model: spread(gaps) for model, gaps in found_gaps.items()},
        "hit_rate": round(hits / turns, 3) if turns else None,
        "memory": watch.stop(),
        "stories": [words for story in desk.stories.values() for words in story if "left the device" in words],
        "digests": digests,
    }


def main() -> None:
    """Every case, every way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="three,two,eight")
    parser.add_argument("--ways", type=int, default=4, help="of the ablation, at most")
    parser.add_argument("--reference", action="store_true", help="first without a cap: the weights must be the same")
    parser.add_argument("--devices", default="cuda:0")
    parser.add_argument("--out", default="", help=f"write JSON here instead of {RESULTS.name}/gpu_memory.json")
    options = parser.parse_args()
    path = Path(options.out) if options.out else RESULTS / "gpu_memory.json"
    rows: list[dict[str, Any]] = []
    for name in options.cases.split(","):
        case = CASES[name]
        ways: list[tuple[bool, bool] | None] = [None] if options.reference else []
        wanted: dict[str, str] = {}
        for way in [*ways, *case.options[: options.ways]]:
            cap = None if way is None else round(case.cap / _GIB, 3)
            row: dict[str, Any] = {"case": name, "cap_gib": cap, "jobs": list(case.models)}
            with tempfile.TemporaryDirectory() as folder:
                try:
                    row |= asyncio.run(run(case, way, Path(folder), options.devices))
                except Exception as error:  # noqa: BLE001 - the others go on
                    row["error"] = f"{type(error).__name__}: {error}"
            if way is None:
                wanted = row.get("digests", {})
            elif wanted:
                row["equal_to_uncapped"] = row.get("digests") == wanted
            rows.append(row)
            print(json.dumps(row), flush=True)
            document = {"schema": 1, "benchmark": "gpu_memory", **conditions(), "devices": options.devices}
            path.write_text(json.dumps({**document, "results": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
