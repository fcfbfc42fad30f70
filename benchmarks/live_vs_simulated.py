"""Compares ten real trainings with the simulator's forecast from profiles learned in another run.

Usage: python benchmarks/live_vs_simulated.py [--paced] [--only NAME]

For each scene the jobs first run in another order, submitted at once, to learn profiles (rates alone and beside one
other, costs of starts, moves and ends; elastic ones once on each number of devices). Then the recorded run, with
weights and arrivals, is replayed from profiles of before and after it. Target: every completion time within 15 %, the
makespan within 10 %. `--paced` makes steps wait most of the time, for machines that are shared.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from measured import save
from trials.late import LateRun

from carpool.backends.profile_library import ProfileLibrary
from carpool.backends.run_folder import BELIEVED, PROFILE, RunFolder
from carpool.cli.support.replay_sim import kept_profiles, simulate_run
from carpool.cli.verbs.replay import as_document, print_replay
from carpool.core.model import JobId, Phase
from carpool.jobs.devices import parse_devices
from carpool.jobs.job_file import ListedJob, parse_jobs
from carpool.policies.registry import parse_policy
from carpool.service.daemon.batch_run import RunRequest

HERE = Path(__file__).resolve().parent / "trials"
WITHIN, WHOLE_WITHIN = 0.15, 0.10
PROBE_STEPS = 150


class Wanted(NamedTuple):
    """A training, for how long it shall run on one device, its weight, and when it is submitted.

    No two have nearly the same weight over length, and all are there before the first device is free: who comes next
    must not hang on a hair, or another run of the very same jobs has another order too.
    """

    entry: str
    hidden: int
    seconds: float
    weight: float
    submit_s: float


JOBS = {
    "a": Wanted("mlp", 512, 7.0, 1.0, 2.5),
    "b": Wanted("mlp", 1024, 6.0, 5.0, 0.0),
    "c": Wanted("cnn", 32, 9.0, 0.9, 4.0),
    "d": Wanted("mlp", 512, 8.0, 5.0, 0.0),
    "e": Wanted("cnn", 64, 6.0, 2.0, 3.0),
    "f": Wanted("mlp", 256, 8.0, 1.8, 1.5),
    "g": Wanted("mlp", 1536, 4.0, 2.5, 2.0),
    "h": Wanted("cnn", 16, 12.0, 0.8, 4.5),
    "i": Wanted("mlp", 256, 10.0, 0.4, 5.0),
    "j": Wanted("mlp", 1024, 3.0, 3.0, 1.0),
}
PAUSE_S = {"mlp": 0.02, "cnn": 0.03}  # of a step with --paced


@dataclass(frozen=True, slots=True)
class Scene:
    """A policy, what it may do, and who teaches."""

    policy: str
    teachers: tuple[tuple[str, int], ...]  # policy and devices of a job, of the runs in which the profiles are learned
    widest: int = 1  # devices that a job may have
    part: float = 1.0  # of the seconds in the table


SCENES = {
    "default": Scene("carpool", (("fifo", 1),)),
    "in order": Scene("fifo", (("srtf", 1),)),
    "elastic": Scene("afs", (("fifo", 1), ("fifo", 2)), widest=2),
    "shared": Scene("mps-equal:slots=2", (("fifo", 1), ("mps-equal:slots=2", 1)), part=0.6),
}


def listed(scene: Scene, steps: Mapping[str, int], *, paced: bool, taught: int = 0) -> tuple[ListedJob, ...]:
    """The jobs as of a job file; those of which something is to be learned backwards, and of one width."""
    rows = []
    for name, job in sorted(JOBS.items(), reverse=taught > 0):
        hidden, pause_s = (job.hidden // 4, PAUSE_S[job.entry]) if paced else (job.hidden, 0.0)
        args = {"hidden": hidden, "steps": max(20, int(scene.part * steps[name])), "pause_s": pause_s}
        row = {"name": name, "entry": f"lively.py:{job.entry}", "args": args, "weight": job.weight}
        rows.append(row | ({"devices": taught} if taught else {"max_devices": scene.widest}))
    return parse_jobs({"job": rows}, HERE, "benchmark")


def counted(root: Path, devices: str, *, paced: bool) -> dict[str, int]:
    """How many steps make up the wanted seconds here, from a few of each."""
    few = dict.fromkeys(JOBS, PROBE_STEPS)
    folder = run(root, "count", "fifo", listed(SCENES["in order"], few, paced=paced, taught=1), devices, {})
    seen = {job: belief.profile.measurements[0].step_s or 1.0 for job, belief in kept_profiles(folder, PROFILE).items()}
    return {job: int(wanted.seconds / seen[JobId(job)]) for job, wanted in JOBS.items()}


def run(
    root: Path, name: str, policy: str, jobs: tuple[ListedJob, ...], devices: str, submit_s: Mapping[str, float]
) -> RunFolder:
    """One live run; its folder, with profiles beside the journal."""
    folder = RunFolder(root / "runs" / name)
    found = tuple(parse_devices(devices))
    request = RunRequest(name, jobs, found, policy, "benchmark", profiles=ProfileLibrary(root).beliefs(jobs))
    begun = LateRun.prepare(request, folder, submit_s)
    asyncio.run(begun.run())
    failed = [account.error for account in begun.accounting.accounts.values() if account.phase is not Phase.FINISHED]
    if failed:
        raise SystemExit(f"{policy}: {failed}")
    return folder


def play(name: str, scene: Scene, steps: Mapping[str, int], devices: str, *, paced: bool) -> dict[str, Any]:
    """Learn, record, replay."""
    submit_s = {name: job.submit_s for name, job in JOBS.items()}
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        for number, (teacher, width) in enumerate(scene.teachers):
            run(root, f"learn-{number}", teacher, listed(scene, steps, paced=paced, taught=width), devices, {})
        folder = run(root, "record", scene.policy, listed(scene, steps, paced=paced), devices, submit_s)
        believed, after = kept_profiles(folder, BELIEVED), kept_profiles(folder, PROFILE)
        results: dict[str, Any] = {"policy": scene.policy, "teachers": scene.teachers, "load": list(os.getloadavg())}
        for which, truth in (("before", believed), ("learned", after)):
            found = simulate_run(folder, parse_policy(scene.policy), truth, believed)
            print(f"\n{name}: {scene.policy}, from profiles {which} the run")
            print_replay(found, print)
            results[which] = as_document(found, name, scene.policy, which)
            results[which]["reached"] = (found.worst or 9.0) <= WITHIN and abs(found.error or 9.0) <= WHOLE_WITHIN
            print(f"  worst {found.worst or 0.0:.1%} (goal {WITHIN:.0%}), goal reached: {results[which]['reached']}")
        results["costs_s"] = {job: belief.profile.costs._asdict() for job, belief in believed.items()}
    return results


def main() -> None:
    """All scenes, or one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--paced", action="store_true", help="steps that wait most of the time")
    parser.add_argument("--only", choices=SCENES, help="one scene")
    parser.add_argument("--devices", default="cpu:2x1")
    options = parser.parse_args()
    results: dict[str, Any] = {"devices": options.devices, "paced": options.paced, "scenes": {}}
    with tempfile.TemporaryDirectory() as place:
        steps = counted(Path(place), options.devices, paced=options.paced)
    results["steps"] = steps
    for name, scene in SCENES.items():
        if options.only in (None, name):
            results["scenes"][name] = play(name, scene, steps, options.devices, paced=options.paced)
            kept = save("live_vs_simulated_paced" if options.paced else "live_vs_simulated", results)
            print(f"wrote {kept}")


if __name__ == "__main__":
    main()
