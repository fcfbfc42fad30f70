"""Measures how well the memory model predicts unmeasured batch sizes, on two real trainings.

    python benchmarks/runtime_memory.py [--device cuda] [--out FILE]

The CNN for CIFAR-10 and the LSTM language model of examples/ run as carpool runs them, each batch size in its own
worker processes. The cubic is fitted to some batch sizes and asked for others, inside and above their range. Errors
are of the memory in use above a fresh worker at the peak of a step; `held` includes the allocator's reserve and has
its own cubic, whose learned margin has to cover it. Exits with 1 when an error is above 6 %.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measured import ROOT, save

from carpool.jobs.devices import LocalDevice, parse_devices
from carpool.jobs.program import Program
from carpool.predictors.profiles.batch_models import MemoryModel
from carpool.predictors.profiles.profile import Measurement
from carpool.runtime.profiling.profiler import MeasurementBudget, Profiler
from carpool.runtime.profiling.sweep import SweepPoint

LIMIT = 0.06
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Case:
    """One training, and the batch sizes that the model sees and does not see."""

    name: str
    entry: str
    args: dict[str, Any]
    seen: tuple[int, ...]
    unseen: tuple[int, ...]


CASES = (
    Case(
        "residual CNN",
        "cifar10_cnn.py:cnn",
        {"channels": 16, "samples": 2048},
        (16, 32, 64, 128, 192),
        (24, 48, 96, 160, 256),
    ),
    Case("LSTM", "lstm_language_model.py:lstm", {"epochs": 1}, (8, 16, 32, 64, 96), (12, 24, 48, 80, 128)),
)


async def measure(case: Case, device: LocalDevice) -> dict[int, Measurement]:
    """Memory at every batch size."""
    program = Program(case.entry, case.args, folder=str(ROOT / "examples"))
    found = {}
    async with Profiler.start(program, [device], MeasurementBudget(seconds=0.01, timeout_s=300.0)) as profiler:
        for batch in sorted({*case.seen, *case.unseen}):
            found[batch] = made = await profiler.measure(SweepPoint((device,), batch))
            if made.error or made.peak_bytes is None:
                raise SystemExit(f"{case.name}, batch {batch}: {made.error}")
    return found


def judge(case: Case, found: dict[int, Measurement]) -> dict[str, Any]:
    """Fit, foretell, print."""
    taken = {batch: made.peak_bytes or 0 for batch, made in found.items()}
    held = {batch: made.held_bytes or 0 for batch, made in found.items()}
    model = MemoryModel().fit(case.seen, [taken[batch] for batch in case.seen])
    whole = MemoryModel().fit(case.seen, [held[batch] for batch in case.seen])
    print(f"\n{case.name}: fitted to batches {', '.join(map(str, case.seen))}; margin of held {whole.margin_:.1%}")
    print(f"{'batch':>6} {'in use':>10} {'foretold':>10} {'error':>8} {'held':>10} {'bound':>10}  covered")
    rows = []
    for batch in case.unseen:
        mean, bound = model.predict(batch).mean, whole.bound(batch)
        error = mean / taken[batch] - 1.0
        row = {"batch": batch, "in_use_bytes": taken[batch], "foretold_bytes": mean, "error": error}
        rows.append({**row, "held_bytes": held[batch], "bound_bytes": bound, "covered": held[batch] <= bound})
        sizes = [f"{size / MIB:6.1f} MiB" for size in (taken[batch], mean, held[batch], bound)]
        yes = "yes" if held[batch] <= bound else "no"
        print(
            f"{batch:>6} {sizes[0]:>10} {sizes[1]:>10} {error:>+8.2%} {sizes[2]:>10} {sizes[3]:>10}  {yes}", flush=True
        )
    worst = max(abs(row["error"]) for row in rows)
    return {
        "job": case.name,
        "entry": case.entry,
        "args": case.args,
        "seen": [{"batch": m, "in_use_bytes": taken[m], "held_bytes": held[m]} for m in case.seen],
        "coefficients": model.coefficients_.tolist(),
        "margin": whole.margin_,
        "worst_error": worst,
        "unseen": rows,
    }


def main() -> int:
    """All cases; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu:1x1", help="as --devices of carpool run; the first one is used")
    parser.add_argument("--out", default="", help="name of the result file, without .json")
    args = parser.parse_args()
    device = parse_devices(args.device)[0]
    print(f"on {device.name} ({device.kind})")
    name = args.out or ("runtime_memory" if device.cuda is None else "runtime_memory_gpu")
    results: list[dict[str, Any]] = []
    for case in CASES:
        results.append(judge(case, asyncio.run(measure(case, device))))
        save(name, {"device": device.kind, "limit": LIMIT, "cases": results})
    worst = max(result["worst_error"] for result in results)
    print(f"\nworst error on batch sizes that were not measured: {worst:.2%} (limit {LIMIT:.0%})")
    return 0 if worst <= LIMIT else 1


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main())
