"""Injects random faults into many small jobs and compares their weights with a run without faults.

Inside a step (by CARPOOL_FAULTS): kill (SIGKILL), stop (SIGSTOP: the worker hangs), memory (out of memory). From
outside, at any moment: shot (SIGKILL to a worker), forkserver (SIGKILL to the fork server: all workers die). Jobs are
the examples in tiny sizes, exact and default, alone and sharing devices. Afterwards no process, shared memory,
temporary file or descriptor may be left.

    python benchmarks/runtime_faults.py --faults 200 --jobs 20 --seed 0 1 2
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from measured import save
from trials.catalogue import EXAMPLES, program
from trials.desk import Desk, JobEnded, left_behind, marked, new_mark, shared_memory

from carpool.jobs.program import Program

DEVICES = (1, 1, 1, 1)  # cores of each: on two cores they take turns
INSIDE = ("kill", "stop", "memory")


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that goes wrong once so many steps are done."""

    step: int
    kind: str


@dataclass(frozen=True, slots=True)
class Planned:
    """A job, where it runs, and what befalls it."""

    name: str
    example: str
    exact: bool
    devices: tuple[int, ...]
    faults: tuple[Fault, ...] = ()


@dataclass(slots=True)
class Ran:
    """What became of all jobs, without faults and with them."""

    calm: dict[str, str] = field(default_factory=dict)  # digest, or why it failed
    rough: dict[str, str] = field(default_factory=dict)
    struck: Counter[str] = field(default_factory=Counter)
    stories: dict[str, list[str]] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)  # behind
    calm_s: float = 0.0
    rough_s: float = 0.0


@dataclass(frozen=True, slots=True)
class How:
    """How all jobs are run."""

    steps: int
    pause_s: float
    at_once: int
    hang_s: float
    seed: int
    retries: int


def plan(jobs: int, faults: int, seed: int, steps: int, forkserver_every: int) -> list[Planned]:
    """Jobs of every kind with faults at random steps, no two of one job at the same step."""
    chance = random.Random(seed)
    planned = []
    for number in range(jobs):
        is_exact = number % 3 < 2
        seats = tuple(chance.sample(range(len(DEVICES)), chance.choice((1, 2, 3) if is_exact else (1, 2))))
        planned.append(Planned(f"j{number:02}", list(EXAMPLES)[number % len(EXAMPLES)], is_exact, seats))
    steps_left = {job.name: list(range(1, steps - 2)) for job in planned}
    for spots in steps_left.values():
        chance.shuffle(spots)
    befalls: dict[str, list[Fault]] = {job.name: [] for job in planned}
    for number in range(faults):
        job = planned[number % jobs].name
        kind = "forkserver" if forkserver_every and number % forkserver_every == forkserver_every - 1 else ""
        kind = kind or chance.choice((*INSIDE, *INSIDE, "shot"))
        # Who strikes from outside hears of steps five times a second: near the end it would come too late.
        spot = next(s for s in steps_left[job] if kind in INSIDE or s < steps // 2)
        steps_left[job].remove(spot)
        befalls[job].append(Fault(spot, kind))
    return [replace(job, faults=tuple(sorted(befalls[job.name], key=lambda f: f.step))) for job in planned]


async def run(planned: Sequence[Planned], folder: Path, how: How) -> Ran:
    """Run all jobs without faults, then with them, in one executor; and look at what is left behind."""
    ran, mark = Ran(), new_mark()
    shared_before, own_before = shared_memory(), _own_descriptors()
    began = time.monotonic()
    desk = await Desk.open(
        folder / "state", DEVICES, mark=mark, hang_s=how.hang_s, mirror_s=0.3, grace_s=1.0, patience_s=900.0
    )
    try:
        at_rest = _kinds(desk.descriptors())
        calm = [replace(job, name=f"c{job.name[1:]}", faults=()) for job in planned]
        ran.calm = await run_jobs(desk, calm, folder, how, ran.struck)
        ran.calm_s = time.monotonic() - began
        ran.rough = await run_jobs(desk, planned, folder, how, ran.struck)
        ran.rough_s = time.monotonic() - began - ran.calm_s
        ran.left = [] if desk.gone else _grown(at_rest, _kinds(desk.descriptors()))
    finally:
        await desk.close()
    for job in planned:
        ran.struck.update(f.kind for n, f in enumerate(job.faults) if (folder / f"{job.name}-{n}").exists())
    ran.stories = desk.stories
    ran.left += left_behind(mark, shared_before, folder / "state")
    if (own_after := _own_descriptors()) > own_before:
        ran.left.append(f"{own_after - own_before} descriptors of the benchmark itself")
    return ran


async def run_jobs(
    desk: Desk, planned: Sequence[Planned], folder: Path, how: How, struck: Counter[str]
) -> dict[str, str]:
    """Run jobs, some at a time: the digest of each, or why it failed."""
    ends: dict[str, str] = {}
    places = asyncio.Semaphore(how.at_once)
    chance = random.Random(how.seed)

    async def one(job: Planned) -> None:
        async with places:
            desk.introduce(job.name, _program(job, folder, how))
            desk.assign(job.name, *job.devices)
            shooting = asyncio.create_task(_shoot(desk, job, chance, struck))
            try:
                ends[job.name] = await desk.end_of(job.name)
            except (TimeoutError, RuntimeError) as error:
                ends[job.name] = f"FAILED: {type(error).__name__} {error}"
            finally:
                shooting.cancel()
            print(f"\r{len(ends)} of {len(planned)} jobs ", end="", flush=True, file=sys.stderr)

    await asyncio.gather(*(one(job) for job in planned))
    return ends


def _program(job: Planned, folder: Path, how: How) -> Program:
    inside = [
        {"job": job.name, "step": fault.step, "kind": fault.kind, "once": str(folder / f"{job.name}-{number}")}
        for number, fault in enumerate(job.faults)
        if fault.kind in INSIDE
    ]
    args = EXAMPLES[job.example].arguments(how.steps, how.pause_s)
    return program(
        args, folder, exact=job.exact, retries=how.retries, environment={"CARPOOL_FAULTS": json.dumps(inside)}
    )


async def _shoot(desk: Desk, job: Planned, chance: random.Random, struck: Counter[str]) -> None:
    """Strike from outside, whatever is just going on there."""
    for fault in job.faults:
        if fault.kind in INSIDE:
            continue
        try:
            await desk.step(job.name, fault.step)
        except (JobEnded, TimeoutError, RuntimeError):
            return
        await asyncio.sleep(chance.uniform(0.0, 0.05))
        name = "carpool-forksrv" if fault.kind == "forkserver" else f"carpool:{job.name}"
        while not (pids := _pids(desk.mark, name)):  # noqa: ASYNC110 - it is just being replaced, by another process
            await asyncio.sleep(0.05)
        with contextlib.suppress(ProcessLookupError):
            os.kill(chance.choice(pids), 9)
            struck[fault.kind] += 1


def _pids(mark: str, name: str) -> list[int]:
    return sorted(pid for pid, comm in marked(mark).items() if comm == name)


def _kinds(descriptors: Sequence[str]) -> Counter[str]:
    """Descriptors by kind: sockets and pipes have numbers that mean nothing."""
    names = (name.partition(":[")[0].partition(" (deleted)")[0] for name in descriptors)
    return Counter(name for name in names if not name.endswith("/executor.log"))  # opened with the first job, kept open


def _grown(before: Counter[str], after: Counter[str]) -> list[str]:
    return [f"{number} descriptors {name} in the executor" for name, number in (after - before).items()]


def _own_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def problems_of(planned: Sequence[Planned], ran: Ran) -> list[str]:
    """What did not hold, in words; empty: all of it did."""
    problems = []
    for job in planned:
        calm, rough = ran.calm[f"c{job.name[1:]}"], ran.rough[job.name]
        if calm.startswith("FAILED"):
            problems.append(f"{job.name} ({job.example}) without faults: {calm}")
        elif rough != calm:
            befell = ", ".join(f"{fault.kind}@{fault.step}" for fault in job.faults)
            outcome = rough if rough.startswith("FAILED") else "other weights"
            where = f"{job.example}, {'exact' if job.exact else 'default'}, devices {job.devices}; {befell}"
            problems.append(f"{job.name} ({where}): {outcome} [{'; '.join(ran.stories.get(job.name, [])[-4:])}]")
    missed = sum(len(job.faults) for job in planned) - sum(ran.struck.values())
    problems += [f"{missed} faults did not strike"] if missed else []
    return problems + [f"left behind: {what}" for what in ran.left]


def main() -> int:
    """Run without faults and with them, compare, keep the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=20)
    parser.add_argument("--seed", type=int, nargs="+", default=[0, 1, 2], help="one run for each")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--pause", type=float, default=0.02, help="seconds after each step")
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--hang", type=float, default=4.0, help="seconds of silence that count as hung")
    parser.add_argument(
        "--forkserver-every", type=int, default=25, help="every so many faults one hits the fork server"
    )
    parser.add_argument("--retries", type=int, default=3, help="deaths without a completed step that fail a job")
    parser.add_argument("--no-save", action="store_true")
    options = parser.parse_args()
    runs = [one_seed(seed, options) for seed in options.seed]
    results = {
        "runs": runs,
        "seeds": options.seed,
        "jobs": sum(run["jobs"] for run in runs),
        "same_weights": sum(run["same_weights"] for run in runs),
        "retries": options.retries,
        "load_average": os.getloadavg()[1],
    }
    if not options.no_save:
        print(f"wrote {save('runtime_faults', results)}")
    return 1 if any(run["problems"] for run in runs) else 0


def one_seed(seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Run without faults and with those of one seed: what came of it, printed as it comes."""
    planned = plan(options.jobs, options.faults, seed, options.steps, options.forkserver_every)
    how = How(options.steps, options.pause, options.at_once, options.hang, seed, options.retries)
    with tempfile.TemporaryDirectory() as folder:
        ran = asyncio.run(run(planned, Path(folder), how))
    problems = problems_of(planned, ran)
    same = sum(ran.rough[job.name] == ran.calm[f"c{job.name[1:]}"] for job in planned)
    struck = ", ".join(f"{number} {kind}" for kind, number in sorted(ran.struck.items()))
    print(f"\nseed {seed}: without faults {ran.calm_s:.0f} s, with {ran.rough_s:.0f} s ({struck})")
    print(f"{same} of {len(planned)} jobs ended with the same weights; left behind: {ran.left or 'nothing'}")
    for problem in problems:
        print(f"did not hold: {problem}", flush=True)
    return {
        "seed": seed,
        "faults": dict(ran.struck),
        "jobs": len(planned),
        "same_weights": same,
        "left_behind": ran.left,
        "problems": problems,
        "seconds_without_faults": round(ran.calm_s, 1),
        "seconds_with_faults": round(ran.rough_s, 1),
    }


if __name__ == "__main__":
    sys.exit(main())
