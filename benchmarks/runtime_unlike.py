"""Do unlike devices share a step by their speeds? Balanced parts against equal parts, over the same number of steps.

    python benchmarks/runtime_unlike.py [--pairs 8] [--block 15] [--fast 8] [--slow 4] [--job cnn] [--limit-s 300]

A job runs in default mode over one device with twice the cores of the other: the CNN of examples/, or a perceptron,
whose steps are large products and scale better over cores. It goes on for the whole comparison, and is told by turns to
cut its steps equally (half of the batch each) and as in every run, by the measured speeds. Each time the same number of
steps is timed, as the workers saw them end, once the cut has settled: from equal parts that takes a dozen steps. Taking
turns every few seconds in one run, and comparing neighbours only, keeps what else the machine does out of the ratio.
With perfect scaling over cores the ratio for 2 : 1 would be 1.5; 1.35 is asked for. On fewer than four cores the
devices are alike and there is nothing to gain: that only shows that the script runs.
"""

from __future__ import annotations

import argparse
import asyncio
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
from carpool.runtime.actions import Cut
from carpool.runtime.jobfolder import JobFolder
from carpool.runtime.program import Program

ASKED = 1.35
SETTLING = {"equal": 3, "balanced": 12}  # steps that are not timed
FOREVER = 10**6  # steps
ENTRIES = {"cnn": "examples/cifar10_cnn.py:cnn", "perceptron": "benchmarks/trials/wide.py:training"}


def job(options: argparse.Namespace) -> tuple[str, dict[str, int]]:
    """The entry, and its arguments."""
    sizes = {"channels": options.channels} if options.job == "cnn" else {"width": options.width, "layers": 3}
    return f"{ROOT}/{ENTRIES[options.job]}", {**sizes, "batch_size": options.batch, "samples": 4 * options.batch}


async def block(desk: Desk, name: str, way: str, notes: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Some steps cut in one way: how long they took."""
    half = options.batch // 2
    parts = (options.batch - half, half) if way == "equal" else ()
    answer = await desk.answered(name, desk.assign(name, *options.devices, parts=parts))
    assert isinstance(answer, AssignApplied)
    first = int(answer.done) + SETTLING[way]
    await desk.step(name, first + options.block)
    at = ends(notes)
    steps_ms = [1e3 * (at[step + 1] - at[step]) for step in range(first, first + options.block)]
    return {"from_step": first, "taken_s": round(sum(steps_ms) / 1e3, 3), "steps_ms": [round(ms, 1) for ms in steps_ms]}


async def compare(desk: Desk, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Both ways by turns, in one training."""
    name = f"unlike-{options.out}"
    notes = folder / name
    notes.mkdir()
    entry, arguments = job(options)
    clocked = {"entry": entry, "notes": str(notes), "steps": FOREVER, "args": arguments}
    desk.introduce(name, Program(entry=ENTRY, args=clocked, folder=str(folder)))
    found: dict[str, list[dict[str, Any]]] = {"equal": [], "balanced": []}
    results: dict[str, Any] = {}
    patience = Patience(options.limit_s)
    await block(desk, name, "balanced", notes, options)  # memory is touched and convolutions are planned
    for _ in range(options.pairs):
        for way, blocks in found.items():
            blocks.append(await block(desk, name, way, notes, options))
        results = judged(found, JobFolder(folder / "state", name).cuts(), options)
        save(options.out, results)
        equal, balanced = (blocks[-1]["taken_s"] for blocks in found.values())
        print(f"equal {equal:7.2f} s, balanced {balanced:7.2f} s, {equal / balanced:5.2f} x", flush=True)
        if patience.is_over:
            break
    await desk.answered(name, desk.release(name))
    ratio, each = results["times_faster"], results["times_faster_each"]
    print(f"balanced is {ratio:.2f} x as fast as equal ({ASKED} asked); each pair {each}", flush=True)
    return results


def judged(found: dict[str, list[dict[str, Any]]], cuts: Sequence[Cut], options: argparse.Namespace) -> dict[str, Any]:
    """How many times faster balanced parts are, pair by pair."""
    pairs = zip(found["equal"], found["balanced"], strict=True)
    ratios = [equal["taken_s"] / balanced["taken_s"] for equal, balanced in pairs]
    return {
        "job": options.job,
        "arguments": job(options)[1],
        "devices": f"cpu:1x{options.fast},1x{options.slow}",
        "steps_of_a_block": options.block,
        "times_faster": round(statistics.median(ratios), 3),
        "times_faster_each": [round(each, 3) for each in ratios],
        "asked": ASKED,
        "parts": [[cut.step, *cut.parts] for cut in cuts],
        "blocks": found,
    }


def parsed(words: Sequence[str] | None = None) -> argparse.Namespace:
    """What is asked for."""
    cores = len(os.sched_getaffinity(0))
    slow = max(1, cores // 4)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fast", type=int, default=max(1, cores // 2), help="cores of the one device (half of all)")
    parser.add_argument("--slow", type=int, default=slow, help="cores of the other one (a quarter of all)")
    parser.add_argument("--job", choices=list(ENTRIES), default="cnn")
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--block", type=int, default=15, help="steps that are timed each time")
    parser.add_argument("--limit-s", type=float, default=300.0, help="begin no pair after so many seconds")
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
