"""Other people's programs on our GPUs while jobs run; the driver pretended."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from carpool.core.messages import ForeignProcess, OutsidersSeen
from carpool.core.model import DeviceId
from carpool.jobs.devices import LocalDevice
from carpool.jobs.nvml import GpuProcess
from carpool.runtime.sharing.foreign_processes import EVERY_S, ForeignProcessMonitor, belongs_to, is_descendant

GPU = LocalDevice(7, "cuda:1", "H200", (), 1)
OURS = 100


class Driver:
    """Lists what it is told to, and counts how often it is asked."""

    def __init__(self) -> None:
        self.rows: list[GpuProcess] | None = []
        self.asked: list[int] = []
        self.now = 0.0
        self.lookout = ForeignProcessMonitor({7: GPU}, lambda: self.now, self.ask, lambda pid: pid == OURS)

    def ask(self, index: int) -> list[GpuProcess] | None:
        self.asked.append(index)
        return self.rows

    def look(self, *pids: int, is_used: bool = True) -> list[tuple[int, str]]:
        self.rows = [GpuProcess(pid, 3 << 30) for pid in pids]
        self.now += EVERY_S
        return self.lookout.tick([7] if is_used else [])


def test_who_comes_and_goes_is_said_once() -> None:
    driver = Driver()
    assert driver.look(OURS) == []
    ((device, words),) = driver.look(OURS, 2**22 + 1)
    assert device == 7
    assert words.startswith("somebody else computes on cuda:1: process 4194305 (3.0 GiB).")
    assert driver.lookout.has_outsiders(7)
    assert driver.look(OURS, 2**22 + 1) == []
    assert driver.look(OURS) == [(7, "nobody else computes on cuda:1 any more")]
    assert not driver.lookout.has_outsiders(7)


def test_who_stays_is_told_to_the_scheduler_and_so_is_that_they_have_gone() -> None:
    driver = Driver()
    driver.look(OURS)
    driver.look(OURS, 2**22 + 1)
    assert driver.lookout.facts == [], "one of ours that has just ended may still be listed"
    driver.look(2**22 + 1, is_used=False)
    driver.look(2**22 + 1, is_used=False)
    driver.look(is_used=False)
    seen = OutsidersSeen(DeviceId(7), (ForeignProcess(2**22 + 1, memory_bytes=3 << 30),), keeps_free=True)
    assert driver.lookout.facts == [seen, OutsidersSeen(DeviceId(7), (), keeps_free=False)]


def test_who_was_there_before_us_does_not_keep_a_gpu_that_was_named_all_the_same() -> None:
    driver = Driver()
    driver.look(os.getppid(), is_used=False)
    driver.look(os.getppid(), is_used=False)
    (seen,) = driver.lookout.facts
    assert not seen.keeps_free
    ((_, user, program, _),) = seen.processes
    assert user
    assert program
    driver.look(os.getppid(), 1, is_used=False)
    driver.look(os.getppid(), 1, is_used=False)
    assert driver.lookout.facts[-1].keeps_free, "somebody has come to it"


def test_processes_that_may_be_ours_under_another_number_keep_nothing() -> None:
    driver = Driver()
    for _ in range(3):
        driver.look(2**22 + 1, is_used=False)  # there is no such process here, and ours were never listed
    assert driver.lookout.facts == []


def test_it_asks_only_now_and_then() -> None:
    driver = Driver()
    for _ in range(105):
        driver.now += EVERY_S / 50
        driver.lookout.tick([])
    assert driver.asked == [1, 1]


def test_a_driver_that_numbers_processes_otherwise_than_we_do_is_not_believed() -> None:
    driver = Driver()
    assert driver.look(5, 6) == []  # our own workers must be among them, under names we do not know
    assert not driver.lookout.has_outsiders(7)
    assert len(driver.look(5, is_used=False)) == 1  # none of ours is there: whoever it is, it is somebody else


def test_a_driver_that_does_not_tell_changes_nothing() -> None:
    driver = Driver()
    driver.look(OURS, 5)
    driver.rows, driver.now = None, driver.now + EVERY_S
    assert driver.lookout.tick([7]) == []
    assert driver.lookout.has_outsiders(7)


def test_where_there_is_no_driver_nothing_is_found() -> None:
    now = iter([0.0, 100.0])
    assert ForeignProcessMonitor({7: GPU}, lambda: next(now)).tick([7]) == []


def test_descendants_are_ours_and_others_are_not() -> None:
    grandchild = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
    program = "import os, sys; print(os.getpid(), flush=True); sys.stdin.read()"
    child = subprocess.Popen(
        [sys.executable, "-c", grandchild, program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    pid = int(child.stdout.readline())
    assert pid != child.pid
    assert is_descendant(pid)
    assert is_descendant(pid, child.pid)
    assert belongs_to(child.pid)(pid)
    assert not is_descendant(child.pid, pid)
    child.communicate()
    assert not is_descendant(pid)  # it is gone
    assert not is_descendant(1)
    assert not is_descendant(os.getppid())


@pytest.mark.parametrize("pid", [0, -1, 2**30])
def test_numbers_that_are_no_process_are_not_ours(pid: int) -> None:
    assert not is_descendant(pid)
