"""Compares ways of dividing parameter updates over heterogeneous devices.

    python benchmarks/runtime_updates.py [--steps 60] [--repeats 3] [--fast 8] [--slow 4] [--limit-s 300]

A job with many parameters and small batches (trials/wide.py: Adam) runs over one device with twice the cores of the
other. "all": every device updates all parameters. "first": the first device updates them for both. "even": half each.
"chosen": what measured update and copy speeds predict to be fastest, reverted if it proves slower. Each has its own
executor; they alternate, and the median step after the thirtieth counts. All must end with the same weights, so the
batch split is fixed. Exits with 1 unless "chosen" is at least as fast as "first" and "even" (within 2 %). --hashed
compares the weights of all ranks after every step.
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
from trials.clocked import ENTRY, learned, median_step_s
from trials.desk import Desk, new_mark

from carpool.jobs.program import Program
from carpool.runtime.job_state.update_sharding import UpdateSharding

JOB = f"{ROOT}/benchmarks/trials/wide.py:training"
SETTLED = 30  # steps after which the division is decided, and was taken back where it proved worse
NOISE = 0.02


class Failed(Exception):
    """A training that was to be timed has failed."""


async def run(desk: Desk, folder: Path, name: str, options: argparse.Namespace) -> tuple[float, str, str]:
    """The median step in milliseconds, the digest, and what the job's story says of it."""
    notes = folder / name
    notes.mkdir()
    arguments = {"width": options.width, "layers": options.layers, "batch_size": options.batch}
    clocked = {"entry": JOB, "notes": str(notes), "steps": options.steps, "args": arguments, "hashed": options.hashed}
    desk.introduce(name, Program(entry=ENTRY, args=clocked, folder=str(folder)))
    slow = options.batch * options.slow // (options.fast + options.slow)
    desk.assign(name, 0, 1, parts=(options.batch - slow, slow))
    digest = await desk.end_of(name)
    if options.hashed:
        seen = learned(notes)
        apart = [step for step in sorted(seen) if len(seen[step]) > 1]
        told = {step: min(seen[step])[:10] for step in sorted(seen)[:: max(1, len(seen) // 8)]}
        print(f"{name}: ranks apart from step {apart[0] if apart else 'never'}; digests {told}", flush=True)
    if digest.startswith("FAILED"):
        raise Failed(f"{name}: {digest}")
    placed = [words for words in desk.stories.get(name, []) if "parameters" in words]
    return 1e3 * median_step_s(notes, SETTLED), digest, placed[-1] if placed else "every device updates all itself"


async def open_desks(folder: Path, options: argparse.Namespace) -> dict[UpdateSharding, Desk]:
    """An executor for each way."""
    cores = (options.fast, options.slow)
    opened = [Desk.open(folder / way, cores, mark=new_mark(), patience_s=600.0, updates=way) for way in UpdateSharding]
    return dict(zip(UpdateSharding, await asyncio.gather(*opened), strict=True))


async def compare(desks: dict[UpdateSharding, Desk], folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """All ways by turns."""
    steps_ms: dict[UpdateSharding, list[float]] = {way: [] for way in UpdateSharding}
    digests: dict[UpdateSharding, list[str]] = {way: [] for way in UpdateSharding}
    stories: list[str] = []
    results: dict[str, Any] = {}
    patience = Patience(options.limit_s)
    for repeat in range(options.repeats):
        for way in UpdateSharding if repeat % 2 else list(UpdateSharding)[::-1]:
            try:
                step_ms, digest, story = await run(desks[way], folder, f"{way}-{repeat}", options)
            except (Failed, TimeoutError) as error:
                print(f"{way:>7}: {error!r}", flush=True)
                continue
            steps_ms[way].append(step_ms)
            digests[way].append(digest)
            stories += [story] if way is UpdateSharding.CHOSEN else []
            print(f"{way:>7}: median step {step_ms:7.1f} ms, {story}", flush=True)
            if all(steps_ms.values()):
                results = judged(steps_ms, options) | judged_weights(digests) | {"chosen": stories}
                save("runtime_updates", results)
        if patience.is_over:
            break
    if not results:
        raise SystemExit("not every way was made")
    ratios = results["chosen_is_times_faster_than"]
    told = ", ".join(f"{ratio} x {way.value!r}" for way, ratio in ratios.items() if way is not UpdateSharding.CHOSEN)
    print(f"the chosen one is as fast as {told}; weights the same: {results['same_weights']}", flush=True)
    print(f"weights: {results['digests']}", flush=True)
    return results


def judged_weights(digests: dict[UpdateSharding, list[str]]) -> dict[str, Any]:
    """Whether all runs ended with the same weights, and whether those of each way did."""
    return {
        "same_weights": len({digest for found in digests.values() for digest in found}) == 1,
        "same_weights_each": {way: len(set(found)) == 1 for way, found in digests.items()},
        "digests": {way: [digest[:12] for digest in found] for way, found in digests.items()},
    }


def judged(steps_ms: dict[UpdateSharding, list[float]], options: argparse.Namespace) -> dict[str, Any]:
    """How much faster the chosen way is than each."""
    medians = {way: statistics.median(found) for way, found in steps_ms.items()}
    return {
        "devices": f"cpu:1x{options.fast},1x{options.slow}",
        "parameters": (options.width + 1) * options.width * options.layers + 75 * options.width + 10,
        "median_step_ms": {way: round(found, 1) for way, found in medians.items()},
        "each_ms": {way: [round(step_ms, 1) for step_ms in found] for way, found in steps_ms.items()},
        "chosen_is_times_faster_than": {
            way: round(medians[way] / medians[UpdateSharding.CHOSEN], 3) for way in UpdateSharding
        },
    }


def parsed(words: Sequence[str] | None = None) -> argparse.Namespace:
    """What is asked for."""
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fast", type=int, default=max(1, cores // 2), help="cores of the first device (half of all)")
    parser.add_argument("--slow", type=int, default=max(1, cores // 4), help="cores of the other one (a quarter)")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--batch", type=int, default=24)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--hashed", action="store_true", help="compare the ranks' weights after every step")
    parser.add_argument("--limit-s", type=float, default=300.0, help="begin no repeat after so many seconds")
    return parser.parse_args(words)


async def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """In executors of its own."""
    desks = await open_desks(folder, options)
    try:
        return await compare(desks, folder, options)
    finally:
        await asyncio.gather(*(desk.close() for desk in desks.values()))


def main() -> None:
    """Measure all ways by turns."""
    with tempfile.TemporaryDirectory() as name:
        results = asyncio.run(measure(Path(name), parsed()))
    ratios = results["chosen_is_times_faster_than"]
    is_quickest = min(ratios[UpdateSharding.FIRST], ratios[UpdateSharding.EVEN]) >= 1.0 - NOISE
    raise SystemExit(0 if is_quickest and results["same_weights"] else 1)


if __name__ == "__main__":
    main()
