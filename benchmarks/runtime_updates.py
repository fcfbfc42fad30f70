"""Who should update the parameters on unlike devices? The chosen division against three fixed ones.

    python benchmarks/runtime_updates.py [--steps 50] [--repeats 3] [--fast 8] [--slow 4]

A job with many parameters and small batches (trials/wide.py: Adam) runs over one device with twice the cores of the
other. "all": every device updates all parameters itself, nothing is exchanged. "first": the first device updates them
for both. "even": half of them each. "chosen": as in every run, what the measured update and copy speeds predict to be
quickest; decided after a few steps. The ways take turns; the median step after the twentieth counts. All of them must
end with the same weights where the parts are the same, so the batch is cut alike by order. Exits with 1 unless the
chosen one is at least as fast as "first" and "even" (two per cent are left for noise).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from measured import ROOT, save
from trials.clocked import ENTRY, median_step_s
from trials.desk import Desk, new_mark

from carpool.runtime.division import Division
from carpool.runtime.program import Program

JOB = f"{ROOT}/benchmarks/trials/wide.py:training"
SETTLED = 20  # steps after which the division is decided
NOISE = 0.02


async def run(folder: Path, way: Division, options: argparse.Namespace) -> tuple[float, str, str]:
    """The median step in milliseconds, the digest, and what the job's story says of it."""
    notes = folder / "notes"
    notes.mkdir()
    cores = (options.fast, options.slow)
    desk = await Desk.open(folder / "state", cores, mark=new_mark(), patience_s=600.0, updates=way)
    try:
        arguments = {"width": options.width, "layers": options.layers, "batch_size": options.batch}
        clocked = {"entry": JOB, "notes": str(notes), "steps": options.steps, "args": arguments}
        desk.introduce("wide", Program(entry=ENTRY, args=clocked, folder=str(folder)))
        slow = options.batch * options.slow // sum(cores)
        desk.assign("wide", 0, 1, parts=(options.batch - slow, slow))
        digest = await desk.end_of("wide")
    finally:
        await desk.close()
    if digest.startswith("FAILED"):
        raise SystemExit(f"{way}: {digest}")
    placed = [words for words in desk.stories.get("wide", []) if "parameters" in words]
    return 1e3 * median_step_s(notes, SETTLED), digest, placed[-1] if placed else "every device updates all itself"


def main() -> None:
    """Measure all ways by turns."""
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fast", type=int, default=cores // 2, help="cores of the first device (half of all)")
    parser.add_argument("--slow", type=int, default=max(1, cores // 4), help="cores of the other one (a quarter)")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--batch", type=int, default=24)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    steps_ms: dict[str, list[float]] = {way: [] for way in Division}
    digests, stories = set(), []
    for _ in range(options.repeats):
        for way in Division:
            with tempfile.TemporaryDirectory() as name:
                step_ms, digest, story = asyncio.run(run(Path(name), way, options))
            steps_ms[way].append(step_ms)
            digests.add(digest)
            stories += [story] if way is Division.CHOSEN else []
            print(f"{way:>7}: median step {step_ms:7.1f} ms, {story}", flush=True)
    medians = {way: statistics.median(found) for way, found in steps_ms.items()}
    ratios = {way: round(medians[way] / medians[Division.CHOSEN], 3) for way in Division}
    results: dict[str, Any] = {
        "devices": f"cpu:1x{options.fast},1x{options.slow}",
        "parameters": (options.width + 1) * options.width * options.layers + 75 * options.width + 10,
        "median_step_ms": {way: round(found, 1) for way, found in medians.items()},
        "each_ms": {way: [round(step_ms, 1) for step_ms in found] for way, found in steps_ms.items()},
        "chosen_is_times_faster_than": ratios,
        "chosen": stories,
        "same_weights": len(digests) == 1,
    }
    told = ", ".join(f"{ratio} x {way.value!r}" for way, ratio in ratios.items() if way is not Division.CHOSEN)
    print(f"the chosen one is as fast as {told}; weights the same: {len(digests) == 1}")
    print(f"wrote {save('runtime_updates', results)}")
    is_quickest = min(ratios[Division.FIRST], ratios[Division.EVEN]) >= 1.0 - NOISE
    raise SystemExit(0 if is_quickest and len(digests) == 1 else 1)


if __name__ == "__main__":
    main()
