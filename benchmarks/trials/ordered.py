"""Runs examples in an executor under direct orders: resized, sharing a device, preempted and resumed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trials.catalogue import program
from trials.desk import Desk, JobEnded
from trials.setting import Ends, Trial


async def resized(trial: Trial, *, exact: bool, cores: Sequence[int] = (1, 1, 2, 1), **args: Any) -> Ends:
    """One job after another, on other devices after every few steps."""
    # A rank that updates a part of the parameters sees only their gradients; to record all, each must update all.
    desk = await open_desk(trial, cores, updates="all" if args.get("record") else "chosen")
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


async def open_desk(trial: Trial, cores: Sequence[int], *, updates: str = "chosen") -> Desk:
    """An executor of this trial."""
    return await Desk.open(trial.folder / "state", cores, mark=trial.mark, mirror_s=0.5, updates=updates)


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
