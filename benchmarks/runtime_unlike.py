"""Do unlike devices share a step by their speeds? Balanced parts against equal parts, over the same number of steps.

    python benchmarks/runtime_unlike.py [--steps 60] [--repeats 5] [--fast 8] [--slow 4] [--job cnn] [--limit-s 300]

A job runs in default mode over one device with twice the cores of the other: the CNN of examples/, or a perceptron,
whose steps are large products and scale better over cores. Balanced: the parts
of the batch follow the guessed, then measured speeds, as in every run. Equal: half of the batch each, by order. Both
take turns, each run is a new job. Counted are the steps after the tenth, as the workers saw them end: before, memory is
touched for the first time and convolutions are planned, which takes both ways the same; the figure with these steps is
kept beside it. With perfect scaling over cores the ratio for 2 : 1 would be 1.5; 1.35 is asked for. On fewer than four
cores the devices are alike and there is nothing to gain: that only shows that the script runs.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measured import ROOT, Patience, save
from trials.clocked import ENTRY, ends
from trials.desk import Desk, new_mark

from carpool.core.messages import AssignApplied
from carpool.runtime.jobfolder import JobFolder
from carpool.runtime.program import Program

ASKED = 1.35
WARM = 10  # steps
ENTRIES = {"cnn": "examples/cifar10_cnn.py:cnn", "perceptron": "benchmarks/trials/wide.py:training"}


def job(options: argparse.Namespace) -> tuple[str, dict[str, int]]:
    """The entry, and its arguments."""
    sizes = {"channels": options.channels} if options.job == "cnn" else {"width": options.width, "layers": 3}
    return f"{ROOT}/{ENTRIES[options.job]}", {**sizes, "batch_size": options.batch, "samples": 4 * options.batch}


async def run(desk: Desk, folder: Path, name: str, options: argparse.Namespace, *, equal: bool) -> dict[str, Any]:
    """One job to its end: how long it took, and the parts it had."""
    notes = folder / name
    notes.mkdir()
    entry, arguments = job(options)
    clocked = {"entry": entry, "notes": str(notes), "steps": options.steps, "args": arguments}
    desk.introduce(name, Program(entry=ENTRY, args=clocked, folder=str(folder)))
    half = options.batch // 2
    generation = desk.assign(name, *options.devices, parts=(options.batch - half, half) if equal else ())
    assert isinstance(await desk.answered(name, generation), AssignApplied)
    digest = await desk.end_of(name)
    if digest.startswith("FAILED"):
        raise SystemExit(f"{name}: {digest}")
    at = ends(notes)
    steps_ms = [1e3 * (then - before) for before, then in itertools.pairwise(at[step] for step in sorted(at))]
    return {
        "taken_s": round(at[options.steps] - at[WARM], 3),
        "from_first_s": round(at[options.steps] - at[1], 3),
        "median_step_ms": round(statistics.median(steps_ms[WARM - 1 :]), 1),
        "parts": {f"from step {cut.step}": list(cut.parts) for cut in JobFolder(folder / "state", name).cuts()},
        "steps_ms": [round(step_ms, 1) for step_ms in steps_ms],
    }


async def compare(desk: Desk, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Both ways by turns, in one executor."""
    found: dict[str, list[dict[str, Any]]] = {"balanced": [], "equal": []}
    results: dict[str, Any] = {}
    patience = Patience(options.limit_s)
    for repeat in range(options.repeats):
        for way in ("equal", "balanced") if repeat % 2 else ("balanced", "equal"):
            made = await run(desk, folder, f"{way}-{options.job}-{repeat}", options, equal=way == "equal")
            found[way].append(made)
            step_ms, parts = made["median_step_ms"], made["parts"]
            print(f"{way:>9} {made['taken_s']:8.2f} s, median step {step_ms:7.1f} ms, parts {parts}", flush=True)
        results = judged(found, options)
        save(options.out, results)
        if patience.is_over:
            break
    ratio, each = results["times_faster"], results["times_faster_each"]
    print(f"balanced is {ratio:.2f} x as fast as equal ({ASKED} asked); each pair {each}", flush=True)
    return results


def judged(found: dict[str, list[dict[str, Any]]], options: argparse.Namespace) -> dict[str, Any]:
    """How many times faster balanced parts are, pair by pair."""
    pairs = list(zip(found["equal"], found["balanced"], strict=True))
    ratios, whole = (
        [equal[span] / balanced[span] for equal, balanced in pairs] for span in ("taken_s", "from_first_s")
    )
    return {
        "job": options.job,
        "arguments": job(options)[1],
        "devices": f"cpu:1x{options.fast},1x{options.slow}",
        "steps": options.steps,
        "times_faster": round(statistics.median(ratios), 3),
        "times_faster_each": [round(each, 3) for each in ratios],
        "times_faster_from_first_step": [round(each, 3) for each in whole],
        "asked": ASKED,
        "runs": found,
    }


def parsed(words: Sequence[str] | None = None) -> argparse.Namespace:
    """What is asked for."""
    cores = len(os.sched_getaffinity(0))
    slow = max(1, cores // 4)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fast", type=int, default=max(1, cores // 2), help="cores of the one device (half of all)")
    parser.add_argument("--slow", type=int, default=slow, help="cores of the other one (a quarter of all)")
    parser.add_argument("--job", choices=list(ENTRIES), default="cnn")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--limit-s", type=float, default=300.0, help="begin no repeat after so many seconds")
    parser.add_argument("--batch", type=int, default=192)
    parser.add_argument("--channels", type=int, default=32 if cores >= 8 else 8, help="of the CNN")
    parser.add_argument("--width", type=int, default=1024 if cores >= 8 else 64, help="of the perceptron")
    parser.add_argument("--out", default="runtime_unlike", help="name of the result file, without .json")
    parser.set_defaults(devices=(0, 1))
    return parser.parse_args(words)


async def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """In an executor of its own."""
    desk = await Desk.open(folder / "state", (options.fast, options.slow), mark=new_mark(), patience_s=600.0)
    try:
        return await compare(desk, folder, options)
    finally:
        await desk.close()


def main() -> None:
    """Measure, print the ratio, and keep it."""
    options = parsed()
    with tempfile.TemporaryDirectory() as name:
        results = asyncio.run(measure(Path(name), options))
    if options.fast == 2 * options.slow and results["times_faster"] < ASKED:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
