"""Does a training learn the same, bit for bit, whatever happens to its devices? Four examples, run in every way.

Exact mode: `carpool run` on 1, 2 and 3 devices and on unlike ones, resized at random steps, switched with another job,
killed, hung, out of memory, interrupted and resumed: one digest, that of `carpool.testing.plain_loop` over 8 shards.
Default mode: the same on unchanged devices; after a resize the gradient of every step against the one-device gradient
from equal weights, and loss curves over seeds, resized against not.

    python benchmarks/runtime_exact.py [--jobs mlp,cnn] [--only "exact: resized"] [--steps 60]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from measured import ROOT, save
from trials.catalogue import ENTRY, EXAMPLES, SHARDS, program
from trials.desk import MARK, Desk, JobEnded, left_behind, new_mark, shared_memory
from trials.judged import ask

Ends = dict[str, str]  # job to digest, or to what went wrong
WHOLE = f"{ROOT}/benchmarks/trials/whole.py:Whole"  # a job over unlike devices: no policy that ships does that
NEAR = 1e-5  # what a step's gradient may differ by after a resize in default mode, relative to its norm
RUN_S = 300.0  # the most that one `carpool run` may take


@dataclass(slots=True)
class Trial:
    """The settings of this benchmark, and where one way of running puts its files."""

    jobs: tuple[str, ...]
    steps: int
    pause_s: float
    seed: int
    folder: Path = Path()
    mark: str = ""
    notes: dict[str, str] = field(default_factory=dict)  # what shows that it was really tried

    @property
    def middle(self) -> int:
        """A step well inside of the training."""
        return random.Random(self.seed).randrange(self.steps // 4, self.steps // 2)

    def arguments(self, job: str, **more: Any) -> dict[str, Any]:
        """What a job's entry takes."""
        return EXAMPLES[job].arguments(self.steps, self.pause_s, **more)


# ---------------------------------------------------------------------------------------------------------- carpool run


def run_all(
    trial: Trial,
    spec: str,
    *,
    exact: bool,
    width: int = 1,
    faults: str = "",
    rank: int | None = None,
    policy: str = "fifo",
) -> Ends:
    """All jobs by one `carpool run`, each on so many devices; with a fault in the middle of each, if one is named."""
    write_jobs(trial, exact=exact, width=width)
    marks = {job: trial.folder / f"struck-{job}" for job in trial.jobs}
    named = [
        {"job": job, "step": trial.middle, "kind": faults, "once": str(marks[job]), "rank": rank}
        for job in trial.jobs
        if faults
    ]
    document = finish(begin(trial, "jobs.toml", "--devices", spec, "--oversubscribe", policy=policy, faults=named))
    ends = digests(document)
    for job in document["jobs"]:
        widest = max((len(given["devices"]) for given in job["allocations"]), default=0)
        if widest != width and not ends[job["name"]].startswith("FAILED"):
            ends[job["name"]] = f"NOT TRIED: it held {widest} devices, not {width}"
        if faults and not marks[job["name"]].exists():
            ends[job["name"]] = f"NOT TRIED: no {faults} struck it"
    return ends


def interrupt(trial: Trial, *, exact: bool, before: str, after: str, width: int = 1) -> Ends:
    """All jobs at a time, stopped with SIGINT when one has made a step, resumed until each was stopped in the middle."""
    write_jobs(trial, exact=exact, width=width)
    caught: dict[str, int] = {}
    for sitting in range(2 * len(trial.jobs)):
        journal = trial.folder / f"journal-{sitting}"
        more = ["--resume"] if sitting else []
        child = begin(trial, "jobs.toml", *more, "--devices", before, "--journal", str(journal))
        await_step(child, journal, set(trial.jobs) - set(caught))
        child.send_signal(signal.SIGINT)
        document = finish(child, codes=(0, 130))
        steps = {job["name"]: job["steps"] for job in document["jobs"] if job["state"] == "interrupted"}
        caught |= {name: made for name, made in steps.items() if name not in caught and 0 < made < trial.steps}
        if len(caught) == len(trial.jobs) or child.returncode == 0:
            break
    trial.notes["interrupted at"] = ", ".join(f"{name} {steps}" for name, steps in caught.items())
    if child.returncode == 130:
        document = finish(begin(trial, "jobs.toml", "--resume", "--devices", after))
    missed = {job: "NOT TRIED: it was never stopped in the middle" for job in trial.jobs if job not in caught}
    return digests(document) | missed


def await_step(child: subprocess.Popen[str], journal: Path, jobs: set[str]) -> None:
    """Wait until one of the jobs has made a step, or the run is over."""
    deadline = time.monotonic() + RUN_S
    told = re.compile(r'"fact": ?"ProgressReported", ?"job": ?"([^"]*)"')
    while child.poll() is None and time.monotonic() < deadline:
        if journal.exists() and jobs.intersection(told.findall(journal.read_text(encoding="ascii"))):
            return
        time.sleep(0.05)


def write_jobs(trial: Trial, *, exact: bool, width: int) -> None:
    """A job file in which every job takes just so many devices."""
    tables = []
    for job in trial.jobs:
        args = trial.arguments(job)
        given = ", ".join(f"{name} = {json.dumps(value)}" for name, value in args["args"].items())
        rest = f'example = "{args["example"]}", steps = {args["steps"]}, pause_s = {args["pause_s"]}'
        lines = ["[[job]]", f'name = "{job}"', f'entry = "{ENTRY}"', f"devices = {width}"]
        lines.append(f"args = {{ {rest}, args = {{ {given} }} }}")
        lines += ["exact = true", f"shards = {SHARDS}"] if exact else []
        tables.append("\n".join(lines))
    (trial.folder / "jobs.toml").write_text("\n\n".join(tables) + "\n", encoding="utf-8")


def begin(
    trial: Trial, *args: str, policy: str = "fifo", faults: Sequence[dict[str, Any]] = ()
) -> subprocess.Popen[str]:
    """Start `carpool run`."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), MARK: trial.mark, "CARPOOL_FAULTS": json.dumps(faults)}
    command = [sys.executable, "-m", "carpool", "run", *args, "--policy", policy, "--state", "state", "--json"]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, text=True, env=env, cwd=trial.folder, start_new_session=True, stdout=pipe, stderr=pipe
    )


def finish(child: subprocess.Popen[str], codes: tuple[int, ...] = (0, 1)) -> dict[str, Any]:
    """What it printed at its end; one that takes too long is killed."""
    try:
        printed, told = child.communicate(timeout=RUN_S)
    except subprocess.TimeoutExpired:
        child.kill()
        printed, told = child.communicate()
        raise TrialFailed(f"carpool run took longer than {RUN_S:.0f} s") from None
    if child.returncode not in codes:
        raise TrialFailed(f"carpool run ended with {child.returncode}: {told.strip()[-300:]}")
    document: dict[str, Any] = json.loads(printed)
    return document


def digests(document: dict[str, Any]) -> Ends:
    """Digests by job, or why there is none."""
    return {job["name"]: job["digest"] or f"FAILED: {job['state']}, {job['error']}" for job in document["jobs"]}


class TrialFailed(Exception):
    """A way of running did not come to its end."""


# ----------------------------------------------------------------------------------------------- through the executor


async def resized(trial: Trial, *, exact: bool, cores: Sequence[int] = (1, 1, 2, 1), **args: Any) -> Ends:
    """One job after another, on other devices after every few steps."""
    desk = await open_desk(trial, cores)
    chance = random.Random(trial.seed)
    ends: Ends = {}
    try:
        for job in trial.jobs:
            desk.introduce(job, program(trial.arguments(job, **args), trial.folder, exact=exact))
            changes = await resize_at_random(desk, job, chance, len(cores))
            trial.notes[job] = f"{len(changes) - 1} resizes at {', '.join(f'{step:.0f}' for step in changes[1:])}"
            ends[job] = await desk.end_of(job)
            if len(changes) < 3:
                ends[job] = f"NOT TRIED: only {len(changes) - 1} resizes"
    finally:
        await desk.close()
    return ends


async def resize_at_random(desk: Desk, job: str, chance: random.Random, num_devices: int) -> list[float]:
    """Give a job other devices at random steps until it is over; the steps at which it changed."""
    changes: list[float] = []
    devices: list[int] = []
    try:
        while True:
            others = [n for n in range(1, num_devices + 1) if n != len(devices)]
            devices = chance.sample(range(num_devices), chance.choice(others))
            applied = await desk.answered(job, desk.assign(job, *devices))
            changes.append(applied.done)
            await desk.step(job, applied.done + chance.randrange(1, 6))
    except JobEnded:
        return changes


async def by_token(trial: Trial, *, exact: bool, width: int) -> Ends:
    """Two jobs at a time on the same devices of one core: every step needs the device's token."""
    desk = await open_desk(trial, (1,) * width)
    ends: Ends = {}
    try:
        for pair in pairs(trial.jobs):
            for turn, job in enumerate(pair):
                desk.introduce(job, program(trial.arguments(job), trial.folder, exact=exact))
                desk.assign(job, *range(width), fraction=0.5, turn=turn)
            for job in pair:
                ends[job] = await desk.end_of(job)
    finally:
        await desk.close()
    return ends


async def in_turns(trial: Trial, *, exact: bool, width: int) -> Ends:
    """Two jobs, one of them on the devices, the other one off them; changed every few steps."""
    desk = await open_desk(trial, (1,) * width)
    chance = random.Random(trial.seed)
    ends: Ends = {}
    try:
        for pair in pairs(trial.jobs):
            for job in pair:
                desk.introduce(job, program(trial.arguments(job), trial.folder, exact=exact))
            switches, left = 0, list(pair)
            while left:
                job = left.pop(0)
                try:
                    applied = await desk.answered(job, desk.assign(job, *range(width)))
                    await desk.step(job, applied.done + chance.randrange(2, 12))
                    await desk.answered(job, desk.release(job))
                    switches, left = switches + 1, [*left, job]
                except JobEnded:
                    ends[job] = await desk.end_of(job)
            trial.notes[" and ".join(pair)] = f"{switches} switches"
    finally:
        await desk.close()
    return ends


def pairs(jobs: Sequence[str]) -> list[tuple[str, ...]]:
    """Two by two; of an odd number the last one is with itself."""
    return [tuple(jobs[start : start + 2]) for start in range(0, len(jobs), 2)]


async def open_desk(trial: Trial, cores: Sequence[int]) -> Desk:
    """An executor of this trial."""
    return await Desk.open(trial.folder / "state", cores, mark=trial.mark, mirror_s=0.5)


# --------------------------------------------------------------------------------------------------------- both modes

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


async def over_seeds(trial: Trial, record: Path, seeds: int) -> Ends:
    """One job with several seeds, on one device and resized."""
    (job,) = trial.jobs
    desk = await open_desk(trial, (1, 1, 1))
    chance = random.Random(trial.seed)
    ends: Ends = {}
    try:
        for seed in range(seeds):
            for how in ("calm", "resized"):
                name = f"{how}-{seed}"
                args = trial.arguments(job, record=str(record / name))
                desk.introduce(name, program(args, trial.folder, seed=seed))
                if how == "calm":
                    desk.assign(name, 0)
                else:
                    changes = await resize_at_random(desk, name, chance, 3)
                    trial.notes[name] = f"{len(changes) - 1} resizes"
                ends[name] = await desk.end_of(name)
    finally:
        await desk.close()
    return ends


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
    loops = {"exact": (SHARDS, 1), "default": (None, 1), "all cores": (None, cores)}
    asked = [
        {"what": "plain", "args": trial.arguments(job) | {"pause_s": 0.0}, "seed": 0, "shards": cut, "threads": threads}
        for cut, threads in loops.values()
        for job in trial.jobs
    ]
    found = iter(ask(asked))
    plain: dict[str, Ends] = {mode: {job: next(found) for job in trial.jobs} for mode in loops}
    results: dict[str, Any] = {"jobs": {job: EXAMPLES[job].what for job in trial.jobs}, "steps": trial.steps}
    results["exact"] = try_ways(trial, "exact", exact_ways(), plain["exact"], options.only)
    results["default"] = try_ways(trial, "default", default_ways(), plain["default"], options.only)
    whole: dict[str, Way] = {"1 device, all cores": lambda t: run_all(t, "cpu:1", exact=False)}
    results["default"] |= try_ways(trial, "default", whole, plain["all cores"], options.only)
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
