"""Simulates power loss during a daemon's writes and checks that every acknowledged record is kept or named.

    python benchmarks/service_power_loss.py [--cases 300] [--jobs 24] [--seed 7] [--daemons 1]

A real daemon runs jobs; after every commit its journal files are copied. Each case derives what a disk may hold after
a power loss (see `tests.support.power_loss`): data after the last sync is cut off, flipped or zero; or synced bytes
are damaged in one file, or in all. Each is opened twice as a store and once as a daemon; the first `--daemons` cases
of each row are started and run the remaining jobs. Columns: records synced, over all cases; kept; lost and named; lost
silently; jobs lost without their name; jobs that were never submitted; cases in which the daemon opened; jobs that
started daemons finished.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

from measured import save

from carpool.core.journal import Header
from carpool.core.model import JobId, JobSpec
from carpool.jobs.devices import LocalDevice, parse_devices
from carpool.jobs.job_file import ListedJob
from carpool.jobs.program import Program
from carpool.runtime.executor.client import ExecutorOptions
from carpool.service.daemon.bootstrap import DaemonInstance, DaemonOptions
from carpool.service.daemon.loop import LoopOptions
from tests.support.power_loss import DAMAGES, Damage, SnapshotCommit, StoreSnapshot, examine, lay_out

OPTIONS = ExecutorOptions(mirror_s=0.5, grace_s=0.5, tick_s=0.02, orphan_s=60.0)
PATIENCE_S = 120.0


@dataclass(slots=True)
class Row:
    """What came of one kind of damage."""

    damage: str
    may_lose: bool
    cases: int = 0
    fine: int = 0  # cases in which nothing was lost in silence, and nothing that need not be
    synced: int = 0  # records, over all cases
    kept: int = 0
    named: int = 0
    silent: int = 0
    unnamed_jobs: int = 0
    invented_jobs: int = 0
    said_something: int = 0  # cases in which the store told of a finding
    opened: int = 0  # cases in which the daemon's house opened
    daemons: int = 0  # real ones that were started
    jobs_ended: int = 0  # by them
    jobs_left: int = 0  # that they should have brought to their end


def setup(state: Path, devices: tuple[LocalDevice, ...], camera: SnapshotCommit | None = None) -> DaemonOptions:
    """A daemon in a folder."""
    loop = LoopOptions() if camera is None else LoopOptions(commit=camera.commit)
    return DaemonOptions(state, devices, "bench", "fifo", "fifo", options=OPTIONS, loop=loop)


async def until(house: DaemonInstance, found: Callable[[], bool]) -> None:
    """Follow the feed until something holds."""
    async with asyncio.timeout(PATIENCE_S):
        async for _ in house.observers.events.feed.listen(0):
            if found():
                return


async def live(state: Path, devices: tuple[LocalDevice, ...], jobs: int, chance: Random) -> list[StoreSnapshot]:
    """A daemon's life, picture by picture: jobs come in groups, run, and end."""
    camera = SnapshotCommit(state)
    house = DaemonInstance.open(setup(state, devices, camera))
    try:
        await house.start()
        running = asyncio.create_task(house.run())
        number = 0
        while number < jobs:
            group = [
                ListedJob(JobSpec(JobId(f"job-{each}")), Program(command=("true",), folder="/"))
                for each in range(number, min(jobs, number + chance.randint(1, 4)))
            ]
            number += len(group)
            await house.loop.submit(group)
        await until(house, lambda: len(house.scheduler.jobs) <= jobs // 3)
        house.stop()
        await running
    finally:
        house.close()
    return camera.pictures


async def go_on(state: Path, devices: tuple[LocalDevice, ...]) -> tuple[int, int]:
    """A real daemon where the power went: how many jobs it had left, and how many of these it brought to their end."""
    house = DaemonInstance.open(setup(state, devices))
    left = len(house.scheduler.jobs)
    try:
        await house.start()
        running = asyncio.create_task(house.run())
        await until(house, lambda: not house.scheduler.jobs)
        house.stop()
        await running
        return left, left - len(house.scheduler.jobs)
    finally:
        house.close()


def play(
    damage: Damage,
    pairs: list[tuple[StoreSnapshot, StoreSnapshot]],
    header: Header,
    devices: tuple[LocalDevice, ...],
    args: argparse.Namespace,
    room: Path,
) -> Row:
    """All cases of one kind of damage."""
    row, chance = Row(damage.name, damage.may_lose), Random(f"{args.seed} {damage.name}")
    for number in range(args.cases):
        now, then = chance.choice(pairs)
        files = damage.harm(chance, now, then)
        verdict = examine(lay_out(files, room / "store"), header, now, then)
        row.cases += 1
        row.fine += verdict.is_fine(damage)
        row.synced += len(now.accepted)
        row.kept += verdict.kept
        row.named += verdict.named
        row.silent += len(verdict.silent)
        row.unnamed_jobs += len(verdict.unnamed_jobs)
        row.invented_jobs += len(verdict.invented)
        row.said_something += bool(verdict.told)
        house = DaemonInstance.open(setup(lay_out(files, room / "house"), devices))
        row.opened += 1
        house.close()
        if number < args.daemons:
            left, ended = asyncio.run(go_on(lay_out(files, room / "daemon"), devices))
            row.daemons += 1
            row.jobs_left += left
            row.jobs_ended += ended
    return row


def main() -> None:
    """Play all kinds of damage, and keep the rows as they come."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=300, help="of each kind of damage")
    parser.add_argument("--jobs", type=int, default=24)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--daemons", type=int, default=1, help="real daemons started for each kind of damage")
    args = parser.parse_args()
    devices = tuple(parse_devices("cpu:2"))
    rows: list[Row] = []
    room = Path(tempfile.mkdtemp(prefix="carpool-power-"))
    try:
        pictures = asyncio.run(live(room / "lived", devices, args.jobs, Random(args.seed)))
        camera = SnapshotCommit(room)
        camera.pictures = pictures
        pairs = [pair for pair in camera.pairs() if pair[0].jobs]
        header = DaemonInstance.header(setup(room, devices))
        print(
            f"{len(pictures)} pictures of a daemon with {args.jobs} jobs; {len(pairs)} pairs with something on its way"
        )
        print(f"{'damage':36}{'cases':>6}{'fine':>6}{'synced':>8}{'kept':>8}{'named':>7}{'silent':>8}"
              f"{'unnamed':>9}{'invented':>10}{'opened':>8}{'ended by daemons':>18}")  # fmt: skip
        for damage in DAMAGES:
            row = play(damage, pairs, header, devices, args, room)
            rows.append(row)
            print(f"{row.damage:36}{row.cases:6}{row.fine:6}{row.synced:8}{row.kept:8}{row.named:7}{row.silent:8}"
                  f"{row.unnamed_jobs:9}{row.invented_jobs:10}{row.opened:8}"
                  f"{f'{row.jobs_ended} of {row.jobs_left}':>18}", flush=True)  # fmt: skip
            save(
                "service_power_loss", {**vars(args), "pictures": len(pictures), "rows": [asdict(each) for each in rows]}
            )
    finally:
        shutil.rmtree(room, ignore_errors=True)


if __name__ == "__main__":
    main()
