"""Runs zoo jobs on one GPU for a benchmark, with their rates and lanes."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trials.desk import MARK, Desk, marked, new_mark
from zoo import ENTRIES, MODELS

from carpool.core.messages import ProgressReported
from carpool.jobs.devices import parse_devices
from carpool.jobs.program import Program
from carpool.runtime.executor.client import ExecutorClient, ExecutorOptions

FOREVER = 10_000_000  # steps
_SETTLED = 20  # steps after a change: first the code's own, then proofs, then replays


async def open_desk(state: Path, *, devices: str = "cuda:0", patience_s: float = 60.0, **options: Any) -> Desk:
    """An executor on the first GPU, or on other devices."""
    mark = new_mark()
    chosen = ExecutorOptions(environment={MARK: mark}, hang_s=30.0, **{"warm": 0, **options})
    link = await ExecutorClient.start(parse_devices(devices), state, options=chosen)
    return Desk(link, mark, patience_s)


def program(model: str, *, graph: bool, batch: int, steps: int = FOREVER, **changes: Any) -> Program:
    """A model of the zoo, as published, on pictures of CIFAR-10's shape."""
    args: dict[str, Any] = {"batch_size": batch, "steps": steps, "channels_last": True}
    if "stem" in inspect.signature(MODELS[model]).parameters:
        args["stem"] = "imagenet"
    return Program(entry=f"{ENTRIES}:{model}", args=args, graph=graph, checkpoint_s=1e6, **changes)


async def together(desk: Desk, shares: dict[str, float], seconds: float, batch: int) -> dict[str, float]:
    """Let jobs run side by side with these fractions; samples per second of each, once they have settled."""
    orders = {job: desk.assign(job, 0, fraction=fraction) for job, fraction in shares.items()}
    await asyncio.gather(*[_settled(desk, job, order) for job, order in orders.items()])
    return await rates(desk, list(shares), seconds, batch)


async def alone(desk: Desk, jobs: Sequence[str], seconds: float, batch: int) -> dict[str, float]:
    """Each of the running jobs by itself: the processes of the others are stopped meanwhile."""
    found: dict[str, float] = {}
    for job in jobs:
        with stopped(desk, [other for other in jobs if other != job]):
            await asyncio.sleep(0.1)  # for what the others had in flight
            found |= await rates(desk, [job], seconds, batch)
    return found


async def rates(desk: Desk, jobs: Sequence[str], seconds: float, batch: int) -> dict[str, float]:
    """Samples per second over a while, from the workers' own reports."""
    before = {job: len(desk.of(job, ProgressReported)) for job in jobs}

    def reports(job: str) -> list[ProgressReported]:
        return desk.of(job, ProgressReported)[before[job] + 1 :]  # less the one that began before

    await asyncio.sleep(seconds)
    await desk.until(lambda: True if all(reports(job) for job in jobs) else None)
    return {job: batch * statistics.fmean(fact.rate for fact in reports(job)) for job in jobs}


@contextmanager
def stopped(desk: Desk, jobs: Sequence[str]) -> Iterator[None]:
    """Stop the processes of some jobs; not for so long that they are taken for hung."""
    names = {f"carpool:{job}"[:15] for job in jobs}
    pids = [pid for pid, name in marked(desk.mark).items() if name in names]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


async def _settled(desk: Desk, job: str, order: int) -> None:
    began = await desk.answered(job, order)
    await desk.step(job, began.done + _SETTLED)


async def rest(desk: Desk, *jobs: str) -> None:
    """Take jobs off the GPU, and wait until they are gone."""
    orders = {job: desk.release(job) for job in jobs}
    await asyncio.gather(*[desk.answered(job, order) for job, order in orders.items()])
