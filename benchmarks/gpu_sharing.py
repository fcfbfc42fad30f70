"""One GPU shared by three trainings: alone and side by side, by the code and as graphs, in every lane there is.

Usage: PYTHONPATH=src python benchmarks/gpu_sharing.py [--shares 33,40,50,60,100] [--seconds 2] [--out FILE]
All jobs run through executors, as `carpool run` starts them. Needs a GPU; MPS lanes need NVIDIA's MPS. The measure is
Σ rate / (rate alone as a graph): one after another with graphs is 1.00.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from measured import RESULTS, conditions
from trials.gpu import alone, open_desk, program, together

MIXES = {
    "V16+R18+M3": ("vgg16", "resnet18", "mobilenet_v3"),
    "R50+S2+D121": ("resnet50", "shufflenet_v2", "densenet121"),
}
BATCH = 128


class Table:
    """Prints each row as it comes, and keeps it."""

    def __init__(self, mix: str, *, deterministic: bool, path: Path, rows: list[dict[str, Any]]) -> None:
        self.mix = mix
        self._path = path
        self.deterministic = deterministic
        self.rows = rows
        self.alone: dict[str, float] = {}

    def add(self, mode: str, rates: dict[str, float]) -> None:
        """A way of running the jobs, with samples per second of each."""
        of_graph = sum(rate / self.alone[name] for name, rate in rates.items()) if self.alone else None
        row = {
            "mix": self.mix,
            "deterministic": self.deterministic,
            "mode": mode,
            "rates": {n: round(r, 1) for n, r in rates.items()},
        }
        if of_graph is not None:
            row["sum_of_graph_alone"] = round(of_graph, 3)
        self.rows.append(row)
        self._save()
        told = "  ".join(f"{name} {rate:9,.0f}" for name, rate in rates.items())
        print(f"{self.mix:12} {mode:28} {told}  Σ {of_graph or 0.0:.3f}", flush=True)

    def fail(self, way: str, error: Exception) -> None:
        """A way that did not come to its end."""
        self.rows.append({"mix": self.mix, "mode": way, "error": f"{type(error).__name__}: {error}"})
        self._save()
        print(f"{self.mix:12} {way}: {type(error).__name__}: {error}", flush=True)

    def _save(self) -> None:
        document = {"schema": 1, "benchmark": "gpu_sharing", **conditions(), "batch": BATCH, "results": self.rows}
        self._path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


async def lanes(table: Table, names: tuple[str, ...], shares: list[int], seconds: float, state: Path) -> None:
    """Side by side in lanes of the whole GPU, each alone (the others stopped), and with equal shares."""
    desk = await open_desk(state)
    try:
        for name in names:
            desk.introduce(name, program(name, graph=True, batch=BATCH, deterministic=table.deterministic))
        whole = await together(desk, dict.fromkeys(names, 1.0), seconds, BATCH)
        table.alone = await alone(desk, names, seconds, BATCH)
        table.add("alone, graph", table.alone)
        table.add("MPS 100 % each, graph", whole)
        for share in shares:
            rates = await together(desk, dict.fromkeys(names, share / 100), seconds, BATCH)
            table.add(f"MPS {share} % each, graph", rates)
    finally:
        await desk.close()


async def eager(table: Table, names: tuple[str, ...], seconds: float, state: Path) -> None:
    """The same without graphs."""
    desk = await open_desk(state)
    try:
        for name in names:
            desk.introduce(name, program(name, graph=False, batch=BATCH, deterministic=table.deterministic))
        whole = await together(desk, dict.fromkeys(names, 1.0), seconds, BATCH)
        table.add("alone, eager", await alone(desk, names, seconds, BATCH))
        table.add("MPS 100 % each, eager", whole)
    finally:
        await desk.close()


async def sliced(table: Table, names: tuple[str, ...], seconds: float, state: Path, *, graph: bool) -> None:
    """A process per job and nothing else, as people run them: the driver gives each its slice of time."""
    async with AsyncExitStack() as stack:
        desks = await asyncio.gather(*[open_desk(state / name, mps=False) for name in names])
        for name, desk in zip(names, desks, strict=True):
            stack.push_async_callback(desk.close)
            desk.introduce(name, program(name, graph=graph, batch=BATCH, deterministic=table.deterministic))
        measured = [together(d, {n: 1.0}, seconds, BATCH) for n, d in zip(names, desks, strict=True)]
        rates = {name: rate for each in await asyncio.gather(*measured) for name, rate in each.items()}
    table.add(f"time slicing, {'graph' if graph else 'eager'}", rates)


async def turns(table: Table, names: tuple[str, ...], seconds: float, state: Path) -> None:
    """The lane without MPS: steps by token."""
    desk = await open_desk(state, mps=False)
    try:
        for name in names:
            desk.introduce(name, program(name, graph=True, batch=BATCH, deterministic=table.deterministic))
        table.add("turns by token, graph", await together(desk, dict.fromkeys(names, 1 / 3), seconds, BATCH))
    finally:
        await desk.close()


async def measure(table: Table, shares: list[int], seconds: float, ways: list[str]) -> None:
    """All ways of running a mix; a way that fails is told, and the others go on."""
    names = MIXES[table.mix]
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        tasks = {
            "lanes": lambda: lanes(table, names, shares, seconds, work / "lanes"),
            "eager": lambda: eager(table, names, seconds, work / "eager"),
            "sliced": lambda: sliced(table, names, seconds, work / "sliced", graph=False),
            "turns": lambda: turns(table, names, seconds, work / "turns"),
        }
        for way in ways:
            try:
                await tasks[way]()
            except Exception as error:  # noqa: BLE001 - see above
                table.fail(way, error)


def main() -> None:
    """Every mix; print rows as they come, and write them down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shares", default="33,40,50,60", help="percent, divided by commas")
    parser.add_argument("--seconds", type=float, default=2.0, help="that each way is measured")
    parser.add_argument("--mixes", default=",".join(MIXES))
    parser.add_argument("--ways", default="lanes,eager,sliced,turns")
    parser.add_argument(
        "--deterministic", default="true,false", help="with the settings of exact trainings, or without"
    )
    parser.add_argument("--out", default="", help=f"write JSON here instead of {RESULTS.name}/gpu_sharing.json")
    options = parser.parse_args()
    shares = [int(share) for share in options.shares.split(",")]
    path = Path(options.out) if options.out else RESULTS / "gpu_sharing.json"
    rows: list[dict[str, Any]] = []
    for setting in options.deterministic.split(","):
        for mix in options.mixes.split(","):
            table = Table(mix, deterministic=setting == "true", path=path, rows=rows)
            asyncio.run(measure(table, shares, options.seconds, options.ways.split(",")))


if __name__ == "__main__":
    main()
