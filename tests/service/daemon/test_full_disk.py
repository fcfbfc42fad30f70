"""A full disk: what was accepted is kept, nothing new is, and all goes on when there is room.

The scenario runs in a process of its own on a small tmpfs, in its own mount namespace.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from carpool.backends.executors import ExecutorPort
from carpool.core.messages import JobCancelled
from carpool.core.model import JobId, Phase
from carpool.jobs.devices import LocalDevice
from carpool.service.daemon.bootstrap import DaemonInstance, DaemonOptions
from carpool.service.daemon.group_commit import ReadOnly
from carpool.service.daemon.loop import LoopOptions
from carpool.service.fleet.executor_access import ChildExecutor
from tests.support.service_rig import ManualExecutor, listed

DEVICES = (LocalDevice(0, "cpu:0", "cpu1", (0,)),)
A, B, C, D = map(JobId, "abcd")
TIMEOUT_S = 60.0
Told = asyncio.Queue[str]  # notices for the operator
ROOT = Path(__file__).parents[3]
MOUNT = 'mount -t tmpfs -o size=12m tmpfs "$1" && shift && exec "$@"'


def fill(folder: Path) -> Path:
    """Write until there is no room left; the file to remove."""
    path = folder / "filler"
    with path.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue
    return path


async def start(devices: Sequence[LocalDevice], state: Path) -> ExecutorPort:
    return ManualExecutor({})


async def serve(folder: Path, body: Callable[[DaemonInstance, Told], Awaitable[None]]) -> None:
    """Start a daemon, do something with it, and stop it."""
    told: Told = asyncio.Queue()
    loop, access = LoopOptions(retry_s=0.01), ChildExecutor(start)
    options = DaemonOptions(folder / "state", DEVICES, "1", "fifo", "fifo", loop=loop, access=access)
    daemon = DaemonInstance.open(replace(options, tell=told.put_nowait))
    await daemon.start()
    running = asyncio.create_task(daemon.run())
    await asyncio.wait_for(body(daemon, told), TIMEOUT_S)
    daemon.stop()
    await running
    daemon.close()


async def room(daemon: DaemonInstance, told: Told) -> None:
    while daemon.loop.disk_full:
        await told.get()


def scenario(folder: Path) -> None:
    """The disk gets full under a daemon, has room again, is full at a start, and has room again."""

    async def first(daemon: DaemonInstance, told: Told) -> None:
        await daemon.loop.submit([listed("a"), listed("b")])
        filler = fill(folder)
        await daemon.loop.apply(JobCancelled(A))  # with the reserve
        assert daemon.loop.disk_full
        with pytest.raises(ReadOnly):
            await daemon.loop.submit([listed("c")])
        fill(folder)
        cancelling = asyncio.create_task(daemon.loop.apply(JobCancelled(B)))
        await asyncio.sleep(0)
        filler.unlink()
        await cancelling  # late, not lost
        await room(daemon, told)
        await daemon.loop.submit([listed("c")])

    async def second(daemon: DaemonInstance, told: Told) -> None:
        assert daemon.loop.disk_full
        assert [daemon.scheduler.outcome(job) for job in (A, B)] == [Phase.CANCELLED] * 2
        assert set(daemon.scheduler.jobs) == {C}
        (folder / "filler").unlink()
        await room(daemon, told)
        await daemon.loop.submit([listed("d")])

    async def third(daemon: DaemonInstance, told: Told) -> None:
        assert not daemon.loop.disk_full
        assert set(daemon.scheduler.jobs) == {C, D}

    asyncio.run(serve(folder, first))
    (folder / "state" / "reserve").unlink()  # the worst case: a daemon died after it had used it
    fill(folder)
    asyncio.run(serve(folder, second))
    asyncio.run(serve(folder, third))


def test_a_daemon_on_a_full_disk_accepts_nothing_keeps_everything_and_starts(tmp_path: Path) -> None:
    in_namespace = ["unshare", "-rm", "sh", "-c", MOUNT, "sh", str(tmp_path)]
    if subprocess.run([*in_namespace, "true"], capture_output=True, check=False).returncode:
        pytest.skip("mount namespaces are not permitted here")
    code = f"from pathlib import Path; from {__name__} import scenario; scenario(Path({str(tmp_path)!r}))"
    done = subprocess.run(
        [*in_namespace, sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-3000:]
