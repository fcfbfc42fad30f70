"""Runs each seed's policy live against its baselines, on lanes of one GPU or on devices of cores.

Usage: python benchmarks/gpu_seed_policies.py [--only hare|iadeep|elastic|loss-phase] [--devices cuda|cpu] [--scale S]
                                              [--budget S] [--repeats N] [--speeds FILE] [--rows hare,wsrtf] [--no-save]

Lanes of different sizes are heterogeneous devices (`--devices cuda:0@50,cuda:0@25,cuda:0@12`). Trainings are plain
PyTorch and torchvision on self-made data. Each is measured once on each device type, with all lanes in use; every
policy starts with these speeds and the number of steps. One executor per table; a row that does not fit into the
budget is skipped, and results are written after every row.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loss_phase import Split
from measured import save
from seeds.lane_world import simulated_s
from seeds.runs import Ended, Model, OutOfTime, Planned, Stage
from seeds.scenes import BUILDERS, CPU_MODELS, EQUAL, EQUAL_CORES, GPU_MODELS, Scene, scene_models

from carpool.core.policy import Policy
from carpool.jobs.devices import as_cluster, parse_devices
from carpool.policies.registry import POLICIES, parse_policy

_GRACE_S = 15.0  # after the budget, before the process ends itself
_FIRST_STEPS = 20  # that show how fast a lone training is
SIMULATED = ("hare", "wsrtf", "srtf", "hare-literal")
SPLITS = {"2-2": (0.5, 0.5), "3-1": (0.75, 0.25), "1-3": (0.25, 0.75)}
PHASES = ("2-2", "3-1", "1-3", "one after another", "loss-phase-literal", "loss-phase", "elastic", "carpool")


@dataclass(slots=True)
class Bench:
    """Options, the time that is left, and results."""

    options: argparse.Namespace
    until: float
    root: Path
    results: dict[str, Any] = field(default_factory=dict)

    @property
    def is_gpu(self) -> bool:
        return str(self.options.devices).startswith("cuda")

    def stage(self, devices: str) -> Stage:
        chosen = self.options.devices if ":" in self.options.devices else devices
        found = parse_devices(chosen, oversubscribe=True)
        print(f"\ndevices {', '.join(device.name for device in found)}", flush=True)
        return Stage(found, self.root / str(time.monotonic_ns()), self.until, 1 if self.is_gpu else 0)

    def keep(self) -> None:
        if not self.options.no_save:
            save(self.options.out or ("gpu_seed_policies" if self.is_gpu else "seed_policies_cpu"), self.results)


async def rows(bench: Bench, table: dict[str, Any], names: list[str], play: Callable[[str], Awaitable[Ended]]) -> None:
    """Run and print the rows of a table, as far as there is time."""
    longest_s = 0.0
    for name in names * bench.options.repeats:
        if bench.options.rows and name.partition(":")[0] not in bench.options.rows:
            continue
        if time.monotonic() + 1.2 * longest_s > bench.until:
            print(f"  {name:22} no time left", flush=True)
            continue
        began = time.monotonic()
        try:
            found = await play(name)
        except (RuntimeError, TimeoutError, OutOfTime) as error:
            table["rows"].append({"policy": name, "error": f"{type(error).__name__}: {error}"[:400]})
            print(f"  {name:22} {type(error).__name__}: {error}"[:400], flush=True)
        else:
            table["rows"].append({"policy": name, **_figures(found)})
            times = f"mean {found.mean_s:6.2f} s  weighted {found.weighted_s:6.2f} s  all {found.makespan_s:6.2f} s"
            gaps = f"  {found.in_gaps} in gaps" if found.in_gaps else ""
            print(f"  {name:22} {times}  {found.changes} changes{gaps}{_notes(found)}", flush=True)
        longest_s = max(longest_s, time.monotonic() - began)
        bench.keep()


def _figures(found: Ended) -> dict[str, Any]:
    return {
        "mean_s": round(found.mean_s, 3),
        "weighted_s": round(found.weighted_s, 3),
        "makespan_s": round(found.makespan_s, 3),
        "changes": found.changes,
        "in_gaps": found.in_gaps,
        "jct_s": {job: round(seconds, 3) for job, seconds in found.jct_s.items()},
    }


def _notes(found: Ended) -> str:
    """Stories of jobs that lost a process or ran without their lane."""
    odd = ("lost", "time-sliced", "MPS", "out of memory", "failed")
    notes = [
        f"{job}: {words}" for job, story in found.stories.items() for words in story if any(o in words for o in odd)
    ]
    return "".join(f"\n      {note}"[:200] for note in notes[:3])


async def play_scene(bench: Bench, scene: Scene) -> None:
    """One table: measure its trainings, then one row per policy."""
    stage = bench.stage(scene.devices)
    known = [name for name in scene.policies if name.partition(":")[0] in POLICIES]
    table: dict[str, Any] = {"devices": [device.name for device in stage.devices], "rows": []}
    bench.results[scene.name] = table
    try:
        began = time.monotonic()
        gangs = [job for job in scene.jobs if job.keys.get("min_devices", 1) > 1]
        await _know_speeds(bench, stage, scene)
        table["speeds"] = stage.speeds
        _print_speeds(stage, time.monotonic() - began)
        table["jobs"] = [
            {"name": job.name, "seconds": job.seconds, "at_s": job.at_s, "weight": job.weight} for job in scene.jobs
        ]
        print(f"{scene.name}: {len(scene.jobs)} jobs{', ' + scene.note if gangs else ''}", flush=True)
        if scene.is_simulated:
            table["simulated_weighted_s"] = found = simulated_s(
                scene.jobs, as_cluster(stage.devices), stage.speeds, [name for name in known if name in SIMULATED]
            )
            told = "  ".join(f"{name} {seconds:.2f}" for name, seconds in found.items())
            print(f"  simulated from these speeds, without starts and moves, weighted s: {told}", flush=True)
        await rows(bench, table, known, lambda name: stage.run(name, scene.jobs))
    finally:
        await stage.close()


async def _know_speeds(bench: Bench, stage: Stage, scene: Scene) -> None:
    """Take the speeds from an earlier result where it has all of them, else measure."""
    stage.speeds = _kept_speeds(bench.options.speeds, scene.name)
    if missing := [model for model in scene_models(scene) if model.name not in stage.speeds]:
        await stage.measure(missing, scene.counts)


def _kept_speeds(path: str, scene: str) -> dict[str, dict[str, float]]:
    if not path:
        return {}
    found: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))["results"].get(scene, {})
    return dict(found.get("speeds", {}))


def _print_speeds(stage: Stage, seconds: float) -> None:
    print(f"  speeds in steps/s, measured in {seconds:.0f} s", flush=True)
    for model, speeds in stage.speeds.items():
        print(f"    {model:12} {'  '.join(f'{kind} {rate:8.1f}' for kind, rate in speeds.items())}", flush=True)


async def loss_phase(bench: Bench) -> None:
    """An older and a younger training that end at a loss, on equal lanes: fixed splits and policies."""
    stage = bench.stage(EQUAL if bench.is_gpu else EQUAL_CORES)
    count = len(stage.devices)
    model = (GPU_MODELS if bench.is_gpu else CPU_MODELS)["conv"]
    model = Model(model.name, model.entry, {**model.args, "lr": 0.001}, model.probe)
    keys = {"devices": count, "min_devices": 1, "max_devices": count}
    table: dict[str, Any] = {"devices": [device.name for device in stage.devices], "rows": []}
    bench.results["loss-phase"] = table
    try:
        await stage.measure([model], tuple(sorted({1, 2, count})))
        _print_speeds(stage, 0.0)
        alone_s = 4.0 * bench.options.scale / 3.0
        lone = await stage.run(Split(count, 0), [Planned("older", model, alone_s, keys=keys)])
        target, took_s = round(lone.losses["older"], 4), lone.jct_s["older"]
        print(f"loss-phase: alone {took_s:.1f} s to a loss of {target}", flush=True)
        table |= {"target": target, "alone_s": took_s, "speeds": stage.speeds}
        gap_s = round(took_s / 1.5, 2)
        jobs = [
            Planned("older", model, target=target, keys={**keys, "seed": 0}),
            Planned("younger", model, target=target, at_s=gap_s, keys={**keys, "seed": 1}),
        ]
        names = [name for name in PHASES if name not in SPLITS or count % 4 == 0 or name == "2-2"]
        limit_s = 20.0 + 6.0 * took_s
        await rows(bench, table, names, lambda name: stage.run(_phase_policy(name, count), jobs, limit_s))
    finally:
        await stage.close()


def _phase_policy(name: str, count: int) -> Policy:
    if name in SPLITS:
        older, younger = SPLITS[name]
        return Split(round(older * count), round(younger * count))
    return parse_policy("fifo" if name == "one after another" else name)


async def measure(bench: Bench) -> None:
    """All tables that were asked for."""
    for name in [*BUILDERS, "loss-phase"]:
        if bench.options.only not in ("", name):
            continue
        if name == "loss-phase":
            await loss_phase(bench)
            continue
        for scene in BUILDERS[name](is_gpu=bench.is_gpu, scale=bench.options.scale):
            if bench.options.scenes and scene.name not in bench.options.scenes:
                continue
            try:
                await play_scene(bench, scene)
            except (RuntimeError, TimeoutError, OutOfTime) as error:
                print(f"{scene.name}: {type(error).__name__}: {error}"[:600], flush=True)
                bench.results[scene.name]["error"] = str(error)[:600]
                bench.keep()


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--only", choices=(*BUILDERS, "loss-phase"), default="")
    parser.add_argument("--scenes", type=lambda text: text.split(","), default=[], help="some tables: hare,gaps")
    parser.add_argument("--rows", type=lambda text: text.split(","), default=[], help="some policies")
    parser.add_argument("--devices", default="cuda", help="cuda or cpu: the tables' own; else --devices of carpool run")
    parser.add_argument("--scale", type=float, default=2.0, help="seconds of a job of usual length on the fastest lane")
    parser.add_argument("--budget", type=float, default=220.0, help="seconds in all; no row begins that will not fit")
    parser.add_argument("--repeats", type=int, default=1, help="of all rows, one round after another")
    parser.add_argument("--out", default="", help="name of the result file, without .json")
    parser.add_argument("--speeds", default="", help="an earlier result file, whose measured speeds are used")
    parser.add_argument("--no-save", action="store_true")
    options = parser.parse_args()
    guard = threading.Timer(options.budget + _GRACE_S, lambda: os._exit(124))  # executors end with this process
    guard.daemon = True
    guard.start()
    with tempfile.TemporaryDirectory() as place:
        bench = Bench(options, time.monotonic() + options.budget, Path(place))
        asyncio.run(measure(bench))
    guard.cancel()


if __name__ == "__main__":
    main()
