"""Parking of real processes, with a fake driver for those on a GPU."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import pytest

from carpool.jobs.devices import LocalDevice
from carpool.runtime.commands.command_parking import CommandParking, ParkingError

GPU = LocalDevice(0, "cuda:0", "H200", (), 0)
CPU = LocalDevice(1, "cpu:0", "cpu1", (0,))
PARENT = "import subprocess, sys; p = subprocess.Popen(['sleep', '1000']); print(p.pid, flush=True); p.wait()"


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


class Tree:
    """A process with a child and a grandchild."""

    def __init__(self) -> None:
        script = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {PARENT!r}])"
        self.root = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, process_group=0)
        assert self.root.stdout is not None
        self.sleeper = int(self.root.stdout.readline())

    def close(self) -> None:
        os.killpg(self.root.pid, 9)
        self.root.wait()
        assert self.root.stdout is not None
        self.root.stdout.close()


@pytest.fixture
def tree() -> Iterator[Tree]:
    tree = Tree()
    yield tree
    tree.close()


class FakeDriver:
    """Records calls and answers with an error."""

    def __init__(self, **errors: str) -> None:
        self.errors = errors
        self.calls: list[tuple[str, tuple[int, ...], str]] = []

    async def __call__(self, action: str, pids: Sequence[int]) -> str:
        self.calls.append((action, tuple(pids), state_of(pids[0])))
        return self.errors.get(action, "")


def new_parking(
    driver: FakeDriver, *, free_gpu: float = 0.0, ram: tuple[int, int] = (90, 100), cuda: Collection[int] = ()
) -> CommandParking:
    return CommandParking(driver, lambda pids: [pid for pid in pids if pid in cuda], lambda _: free_gpu, lambda: ram)


def test_on_a_cpu_all_processes_stop_and_continue(tree: Tree) -> None:
    async def go() -> None:
        parking = new_parking(FakeDriver(), cuda=[tree.sleeper])
        await parking.park(tree.root.pid, [CPU])
        assert state_of(tree.sleeper) == "T"
        assert state_of(tree.root.pid) != "T"
        await parking.restore(tree.root.pid, [0])
        assert state_of(tree.sleeper) != "T"
        assert os.sched_getaffinity(tree.sleeper) == {0}

    asyncio.run(go())


def test_on_a_gpu_the_driver_checkpoints_running_processes_and_restores_them_when_they_continue(tree: Tree) -> None:
    async def go() -> None:
        driver = FakeDriver()
        parking = new_parking(driver, cuda=[tree.sleeper])
        await parking.park(tree.root.pid, [GPU])
        assert state_of(tree.sleeper) == "T"
        await parking.restore(tree.root.pid, [])
        assert [(action, pids) for action, pids, _ in driver.calls] == [
            ("park", (tree.sleeper,)),
            ("restore", (tree.sleeper,)),
        ]
        assert "T" not in [state for *_, state in driver.calls]

    asyncio.run(go())


def test_under_mps_a_command_is_only_stopped_if_the_gpu_has_room(tree: Tree) -> None:
    async def go() -> None:
        driver = FakeDriver(park="code 801")
        parking = new_parking(driver, cuda=[tree.sleeper], free_gpu=0.4)
        with pytest.raises(ParkingError, match="801"):
            await parking.park(tree.root.pid, [GPU])
        assert state_of(tree.sleeper) != "T"
        parking = new_parking(driver, cuda=[tree.sleeper], free_gpu=0.6)
        assert "801" in await parking.park(tree.root.pid, [GPU])
        assert state_of(tree.sleeper) == "T"
        await parking.restore(tree.root.pid, [])
        assert [action for action, *_ in driver.calls] == ["park", "park"]

    asyncio.run(go())


def test_a_host_without_ram_parks_nothing(tree: Tree) -> None:
    with pytest.raises(ParkingError, match="RAM"):
        asyncio.run(new_parking(FakeDriver(), ram=(4, 100)).park(tree.root.pid, [CPU]))
    assert state_of(tree.sleeper) != "T"


def test_a_command_that_the_driver_cannot_restore_stays_parked(tree: Tree) -> None:
    async def go() -> None:
        driver = FakeDriver(restore="code 2")
        parking = new_parking(driver, cuda=[tree.sleeper])
        await parking.park(tree.root.pid, [GPU])
        with pytest.raises(ParkingError, match="code 2"):
            await parking.restore(tree.root.pid, [])
        assert state_of(tree.sleeper) == "T"
        driver.errors.clear()
        await parking.restore(tree.root.pid, [])
        assert driver.calls[-1][:2] == ("restore", (tree.sleeper,))
        assert state_of(tree.sleeper) != "T"

    asyncio.run(go())
