"""Events that may happen to a job."""

from __future__ import annotations

import itertools
from typing import Any

from carpool.runtime.job_state.types import JobOptions
from tests.runtime.job_state.harness import SHARDS, Harness


def options(exact: bool, **more: Any) -> JobOptions:
    return JobOptions(exact=exact, shards=SHARDS, retries=1000, mirror_s=1.5, checkpoint_s=4.0, **more)


def started(exact: bool, *devices: int, **more: Any) -> Harness:
    harness = Harness(options(exact, **more))
    harness.order(*devices)
    return harness


def happen(harness: Harness, kind: str, what: Any) -> None:
    workers = harness.alive_workers
    picked = workers[what % len(workers)] if workers and isinstance(what, int) else None
    match kind:
        case "act" if picked:
            picked.act()
        case "hear" if picked:
            harness.deliver(picked)
        case "rounds":
            for worker in [worker for _ in range(what) for worker in workers]:
                worker.act()
                harness.deliver(worker)
        case "both":
            for worker in itertools.islice(itertools.cycle(workers), what if workers else 0):
                worker.act()
                harness.deliver(worker)
        case "order":
            harness.order(*what)
        case "kill" if picked:
            picked.alive = False
        case "hang" if picked:
            picked.hung = True
        case "out_of_memory" if picked and harness.exclusive == 0 and not any(w.runs_short for w in workers):
            picked.short = True
        case "tick":
            harness.tick()
        case "grant" if harness.is_requested:
            harness.is_requested = False
            harness.run_actions(harness.machine.exclusive_granted(harness.at))
        case "pause":
            harness.run_actions(harness.machine.pause(harness.at, paused=what))
        case "suspend":
            harness.run_actions(harness.machine.suspend(harness.at, suspended=what))
        case "time_slice":
            harness.run_actions(harness.machine.set_time_sliced(harness.at, time_sliced=what))
