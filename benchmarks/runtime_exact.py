"""Checks that trainings end with bit-identical weights whatever happens to their devices.

Exact mode: `carpool run` on 1, 2 and 3 devices and on heterogeneous ones, resized at random steps, switched with
another job, killed, hung, out of memory, interrupted and resumed: one digest, that of `carpool.testing.plain_loop`
over 8 shards. Default mode: the same on unchanged devices; after a resize the gradient of every step against the
one-device gradient from equal weights, and loss curves over seeds, resized against not.

    python benchmarks/runtime_exact.py [--jobs mlp,cnn] [--only "exact: resized"] [--steps 60]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from measured import save
from trials.catalogue import EXAMPLES, SHARDS
from trials.commanded import WHOLE, interrupt, run_all
from trials.desk import left_behind, new_mark, shared_memory
from trials.judged import ask
from trials.ordered import by_token, in_turns, over_seeds, resized
from trials.setting import Ends, Trial, TrialFailed

NEAR = 1e-5  # what a step's gradient may differ by after a resize in default mode, relative to its norm
Way = Callable[[Trial], Ends]


def exact_ways() -> dict[str, Way]:
    """Every way of running the jobs in exact mode."""
    return {
        "1 device": lambda t: run_all(t, "cpu:1", exact=True),
        "2 devices": lambda t: run_all(t, "cpu:2", exact=True, width=2),
        "3 devices": lambda t: run_all(t, "cpu:3", exact=True, width=3),
        "unlike devices": lambda t: run_all(t, "cpu:1x1,1x2", exact=True, width=2, policy=WHOLE),
        "resized at random steps": lambda t: asyncio.run(resized(t, exact=True)),
        "switched, by token": lambda t: asyncio.run(by_token(t, exact=True, width=2)),
        "switched, on and off": lambda t: asyncio.run(in_turns(t, exact=True, width=2)),
        "worker killed": lambda t: run_all(t, "cpu:2", exact=True, width=2, faults="kill"),
        "worker hung": lambda t: run_all(t, "cpu:4", exact=True, width=2, faults="stop", rank=1),
        "out of memory": lambda t: run_all(t, "cpu:2", exact=True, width=2, faults="memory", rank=0),
        "interrupted, resumed": lambda t: interrupt(t, exact=True, before="cpu:4", after="cpu:1"),
    }


def default_ways() -> dict[str, Way]:
    """Every way that must not change what is learned on one device of one core."""
    one = "cpu:1x1"
    return {
        "1 device": lambda t: run_all(t, one, exact=False),
        "switched, by token": lambda t: asyncio.run(by_token(t, exact=False, width=1)),
        "paused, on and off": lambda t: asyncio.run(in_turns(t, exact=False, width=1)),
        "worker killed": lambda t: run_all(t, one, exact=False, faults="kill"),
        "worker hung": lambda t: run_all(t, "cpu:4", exact=False, faults="stop"),
        "out of memory": lambda t: run_all(t, one, exact=False, faults="memory"),
        "interrupted, resumed": lambda t: interrupt(t, exact=False, before="cpu:4", after="cpu:4"),
    }


def pair_ways() -> dict[str, Way]:
    """Every way that must not change what is learned on two devices of one core in default mode."""
    return {
        "2 devices": lambda t: run_all(t, "cpu:2", exact=False, width=2),
        "switched, by token": lambda t: asyncio.run(by_token(t, exact=False, width=2)),
        "paused, on and off": lambda t: asyncio.run(in_turns(t, exact=False, width=2)),
        "worker killed": lambda t: run_all(t, "cpu:2", exact=False, width=2, faults="kill"),
        "out of memory": lambda t: run_all(t, "cpu:2", exact=False, width=2, faults="memory"),
        "interrupted, resumed": lambda t: interrupt(t, exact=False, before="cpu:8", after="cpu:8", width=2),
    }


def try_ways(trial: Trial, mode: str, ways: dict[str, Way], wanted: Ends, only: str) -> dict[str, Any]:
    """Run the jobs in every way and print what is equal; without a reference the first way is it."""
    results: dict[str, Any] = {}
    for name, way in ways.items():
        if only and only not in f"{mode}: {name}" and (wanted or results):
            continue
        ends, notes, left, seconds = try_one(trial, way)
        wanted = wanted or ends
        row = {job: _verdict(ends.get(job, "FAILED: no end"), wanted[job]) for job in trial.jobs}
        results[name] = {"jobs": row, "notes": notes, "left_behind": left, "seconds": round(seconds, 1)}
        words = "  ".join(f"{job} {row[job][:60]}" for job in trial.jobs)
        print(f"{mode:<9} {name:<24} {words}  {seconds:.0f} s", flush=True)
        for told in (*(f"{key}: {value}" for key, value in notes.items()), *(f"LEFT BEHIND: {what}" for what in left)):
            print(f"{'':<9} {'':<24} {told}")
        for job, word in row.items():
            if word != "equal":
                print(f"{'':<9} {'':<24} {job}: {word}")
    return results


def try_one(trial: Trial, way: Way) -> tuple[Ends, dict[str, str], list[str], float]:
    """One way of running, in a folder of its own: ends, notes, what is left behind, seconds."""
    began, shared_before = time.monotonic(), shared_memory()
    trial.mark, trial.notes = new_mark(), {}
    with tempfile.TemporaryDirectory() as folder:
        trial.folder = Path(folder)
        try:
            ends = way(trial)
        except (TrialFailed, TimeoutError, RuntimeError, OSError) as error:
            ends = dict.fromkeys(trial.jobs, f"FAILED: {type(error).__name__} {error}")
        left = left_behind(trial.mark, shared_before, trial.folder)
    return ends, trial.notes, left, time.monotonic() - began


def _verdict(end: str, wanted: str) -> str:
    if end.startswith(("FAILED", "NOT TRIED")):
        return end
    return "equal" if end == wanted else f"OTHER: {end[:12]}, not {wanted[:12]}"


# ------------------------------------------------------------------------------------------------ gradients and curves


def gradients(trial: Trial) -> dict[str, Any]:
    """Largest error of a step's gradient in a resized default-mode job, relative to one device and equal weights."""
    results: dict[str, Any] = {}
    jobs = [job for job in trial.jobs if EXAMPLES[job].plain or job == "ncf"]  # BatchNorm takes statistics per part
    for job in jobs:
        with tempfile.TemporaryDirectory() as folder:
            record = f"{folder}/record"
            alone = Trial((job,), trial.steps, trial.pause_s, trial.seed)
            ends, notes, _, _ = try_one(
                alone,
                lambda t, r=record: asyncio.run(resized(t, exact=False, record=r, plain=True)),  # type: ignore[misc]
            )
            if not re.fullmatch("[0-9a-f]{64}", ends[job]):
                results[job] = {"error": ends[job]}
                print(f"gradients {job}: {ends[job]}")
                continue
            args = EXAMPLES[job].arguments(trial.steps, 0.0, plain=True)
            (errors,) = ask([{"what": "gradients", "args": args, "seed": 0, "record": record}])
        results[job] = {"steps": len(errors), "largest_relative_error": max(errors), "notes": notes}
        print(f"gradients {job}: largest relative error {max(errors):.1e} over {len(errors)} steps; {notes[job]}")
    return results


def curves(trial: Trial, seeds: int) -> dict[str, Any]:
    """Losses over seeds, resized against not: means, spread over seeds, and how far apart they are at most."""
    results: dict[str, Any] = {}
    every = max(1, trial.steps // 8)
    for job in [job for job in trial.jobs if job in {"mlp", "cnn"}]:  # dropout, BatchNorm: cutting matters here
        with tempfile.TemporaryDirectory() as folder:
            alone = Trial((job,), trial.steps, trial.pause_s, trial.seed)
            ends, _, _, _ = try_one(alone, lambda t, f=folder: asyncio.run(over_seeds(t, Path(f), seeds)))  # type: ignore[misc]
            if failed := [f"{name}: {end}" for name, end in ends.items() if not re.fullmatch("[0-9a-f]{64}", end)]:
                results[job] = {"error": "; ".join(failed)}
                print(f"curves    {job}: {failed[0]}")
                continue
            args = alone.arguments(job)
            asked = [
                {"what": "curve", "args": args, "seed": seed, "record": f"{folder}/{how}-{seed}", "every": every}
                for how in ("calm", "resized")
                for seed in range(seeds)
            ]
            found = ask(asked)
        calm, changed = found[:seeds], found[seeds:]
        rows = []
        for point, (a, b) in enumerate(zip(zip(*calm, strict=True), zip(*changed, strict=True), strict=True)):
            spread = statistics.stdev([*a, *b])
            apart = abs(statistics.mean(a) - statistics.mean(b))
            rows.append(
                {
                    "step": (point + 1) * every,
                    "mean": round(statistics.mean(a), 4),
                    "mean_resized": round(statistics.mean(b), 4),
                    "spread": round(statistics.stdev(a), 4),
                    "spread_resized": round(statistics.stdev(b), 4),
                    "overlap": max(min(a), min(b)) <= min(max(a), max(b)),
                    "apart_in_spreads": round(apart / spread, 2) if spread else 0.0,
                }
            )
            print(f"curves    {job}: {rows[-1]}")
        results[job] = {"seeds": seeds, "points": rows}
    return results


def plain_loops(trial: Trial, shards: int | None, threads: int) -> Ends:
    """The digests of ordinary loops."""
    how = {"what": "plain", "seed": 0, "shards": shards, "threads": threads}
    asked = [{"args": trial.arguments(job) | {"pause_s": 0.0}, **how} for job in trial.jobs]
    return dict(zip(trial.jobs, ask(asked), strict=True))


def main() -> int:
    """Try every way, print a table as it goes, keep the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", default="mlp,cnn,ncf,bert", help=f"of {', '.join(EXAMPLES)}")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--pause", type=float, default=0.03, help="seconds after each step, so that all can be hit")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0, help="of what happens at random")
    parser.add_argument("--only", default="", help="only ways with these words, for example 'exact: resized'")
    options = parser.parse_args()
    trial = Trial(tuple(options.jobs.split(",")), options.steps, options.pause, options.seed)
    began = time.monotonic()
    for job in trial.jobs:
        print(f"{job}: {EXAMPLES[job].entry}, {EXAMPLES[job].what}")
    cores = len(os.sched_getaffinity(0))
    # Threads that wait for each other at every tiny operation crawl on a busy machine: one job shows it.
    threaded = replace(trial, jobs=tuple(job for job in trial.jobs if job == "cnn") or trial.jobs[:1])
    loops = {"exact": (trial, SHARDS, 1), "default": (trial, None, 1), "all cores": (threaded, None, cores)}
    plain = {mode: plain_loops(*loop) for mode, loop in loops.items()}
    results: dict[str, Any] = {"jobs": {job: EXAMPLES[job].what for job in trial.jobs}, "steps": trial.steps}
    results["exact"] = try_ways(trial, "exact", exact_ways(), plain["exact"], options.only)
    results["default"] = try_ways(trial, "default", default_ways(), plain["default"], options.only)
    whole: dict[str, Way] = {"1 device, all cores": lambda t: run_all(t, "cpu:1", exact=False)}
    results["default"] |= try_ways(threaded, "default", whole, plain["all cores"], options.only)
    if not options.only or "default 2" in options.only:
        results["default_2_devices"] = try_ways(trial, "default 2", pair_ways(), {}, options.only)
    if not options.only or "gradients" in options.only:
        results["gradients"] = gradients(trial)
    if not options.only or "curves" in options.only:
        results["curves"] = curves(trial, options.seeds)
    results |= {"load_average": os.getloadavg()[1], "seconds": round(time.monotonic() - began)}
    if not options.only:
        print(f"wrote {save('runtime_exact', results)}")
    rows = [row for mode in ("exact", "default", "default_2_devices") for row in results.get(mode, {}).values()]
    cells = [word for row in rows for word in row["jobs"].values()]
    clean = not any(row["left_behind"] for row in rows)
    near = all(row.get("largest_relative_error", 1.0) <= NEAR for row in results.get("gradients", {}).values())
    print(f"{cells.count('equal')} of {len(cells)} equal; gradients {'near' if near else 'NOT NEAR'}; ", end="")
    print(f"left behind: {'nothing' if clean else 'SOMETHING'}; {results['seconds']} s")
    return 0 if cells.count("equal") == len(cells) and near and clean else 1


if __name__ == "__main__":
    sys.exit(main())
