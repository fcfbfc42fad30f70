"""Teams at their start, and what may happen to them."""

from __future__ import annotations

import itertools
from typing import Any

from carpool.runtime.job_state.types import JobOptions
from tests.runtime.job_state.world import SHARDS, World


def patient(exact: bool, **more: Any) -> JobOptions:
    return JobOptions(exact=exact, shards=SHARDS, retries=1000, mirror_s=1.5, checkpoint_s=4.0, **more)


def started(exact: bool, *devices: int, **more: Any) -> World:
    world = World(patient(exact, **more))
    world.order(*devices)
    return world


def happen(world: World, kind: str, what: Any) -> None:
    living = world.living
    picked = living[what % len(living)] if living and isinstance(what, int) else None
    match kind:
        case "act" if picked:
            picked.act()
        case "hear" if picked:
            world.hear(picked)
        case "rounds":
            for worker in [worker for _ in range(what) for worker in living]:
                worker.act()
                world.hear(worker)
        case "both":
            for worker in itertools.islice(itertools.cycle(living), what if living else 0):
                worker.act()
                world.hear(worker)
        case "order":
            world.order(*what)
        case "kill" if picked:
            picked.alive = False
        case "hang" if picked:
            picked.hung = True
        case "short" if picked and world.alone == 0 and not any(w.runs_short for w in living):
            picked.short = True
        case "tick":
            world.tick()
        case "alone" if world.asking:
            world.asking = False
            world.do(world.team.left_alone(world.at))
        case "hold":
            world.do(world.team.hold(world.at, held=what))
        case "wait":
            world.do(world.team.wait(world.at, waits=what))
        case "turns":
            world.do(world.team.take_turns(world.at, by_token=what))
