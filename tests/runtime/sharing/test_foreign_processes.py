"""Foreign processes on GPUs, with a fake driver."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from carpool.core.messages import ForeignProcess, OutsidersSeen
from carpool.core.model import DeviceId
from carpool.jobs.devices import LocalDevice
from carpool.jobs.nvml import GpuProcess
from carpool.runtime.process.launch import EXECUTOR_PID
from carpool.runtime.sharing.foreign_processes import INTERVAL_S, ForeignProcessMonitor, belongs_to, is_descendant

GPU = LocalDevice(7, "cuda:1", "H200", (), 1)
OURS = 100


class Driver:
    """Lists the given processes and records the calls."""

    def __init__(self) -> None:
        self.rows: list[GpuProcess] | None = []
        self.calls: list[int] = []
        self.now = 0.0
        self.monitor = ForeignProcessMonitor({7: GPU}, lambda: self.now, self.list_processes, lambda pid: pid == OURS)

    def list_processes(self, index: int) -> list[GpuProcess] | None:
        self.calls.append(index)
        return self.rows

    def look(self, *pids: int, is_used: bool = True) -> list[tuple[int, str]]:
        self.rows = [GpuProcess(pid, 3 << 30) for pid in pids]
        self.now += INTERVAL_S
        return self.monitor.tick([7] if is_used else [])


def test_a_process_is_noted_once_when_it_comes_and_goes() -> None:
    driver = Driver()
    assert driver.look(OURS) == []
    ((device, note),) = driver.look(OURS, 2**22 + 1)
    assert device == 7
    assert all(part in note for part in ("cuda:1", "4194305", "3.0 GiB"))
    assert driver.monitor.has_foreign_processes(7)
    assert driver.look(OURS, 2**22 + 1) == []
    assert [device for device, _ in driver.look(OURS)] == [7]
    assert not driver.monitor.has_foreign_processes(7)


def test_a_process_that_stays_is_reported_to_the_scheduler_until_it_is_gone() -> None:
    driver = Driver()
    driver.look(OURS)
    driver.look(OURS, 2**22 + 1)
    assert driver.monitor.facts == [], "an exited worker may still be listed"
    driver.look(2**22 + 1, is_used=False)
    driver.look(2**22 + 1, is_used=False)
    driver.look(is_used=False)
    seen = OutsidersSeen(DeviceId(7), (ForeignProcess(2**22 + 1, memory_bytes=3 << 30),), keeps_free=True)
    assert driver.monitor.facts == [seen, OutsidersSeen(DeviceId(7), (), keeps_free=False)]


def test_a_process_that_was_there_first_does_not_keep_a_named_gpu() -> None:
    driver = Driver()
    driver.look(os.getppid(), is_used=False)
    driver.look(os.getppid(), is_used=False)
    (seen,) = driver.monitor.facts
    assert not seen.keeps_free
    ((_, user, program, _),) = seen.processes
    assert user
    assert program
    driver.look(os.getppid(), 1, is_used=False)
    driver.look(os.getppid(), 1, is_used=False)
    assert driver.monitor.facts[-1].keeps_free, "a new process came"


def test_processes_under_unknown_pids_are_not_reported() -> None:
    driver = Driver()
    for _ in range(3):
        driver.look(2**22 + 1, is_used=False)  # there is no such process here, and ours were never listed
    assert driver.monitor.facts == []


def test_the_driver_is_asked_at_an_interval() -> None:
    driver = Driver()
    for _ in range(105):
        driver.now += INTERVAL_S / 50
        driver.monitor.tick([])
    assert driver.calls == [1, 1]


def test_a_driver_with_other_pid_numbers_is_ignored_on_devices_in_use() -> None:
    driver = Driver()
    assert driver.look(5, 6) == []  # our own workers are among them, under other pids
    assert not driver.monitor.has_foreign_processes(7)
    assert len(driver.look(5, is_used=False)) == 1  # none of our workers is there


def test_no_answer_of_the_driver_changes_nothing() -> None:
    driver = Driver()
    driver.look(OURS, 5)
    driver.rows, driver.now = None, driver.now + INTERVAL_S
    assert driver.monitor.tick([7]) == []
    assert driver.monitor.has_foreign_processes(7)


def test_without_a_driver_nothing_is_found() -> None:
    now = iter([0.0, 100.0])
    assert ForeignProcessMonitor({7: GPU}, lambda: next(now)).tick([7]) == []


def test_descendants_are_ours() -> None:
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
    assert not is_descendant(pid)  # it has exited
    assert not is_descendant(1)
    assert not is_descendant(os.getppid())


def test_processes_of_a_command_are_ours_although_its_reaper_has_another_parent() -> None:
    executor = 2**22 + 7
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], env={})"
    program = "import os, sys; print(os.getpid(), flush=True); sys.stdin.read()"
    reaper = subprocess.Popen(
        [sys.executable, "-c", child, program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={EXECUTOR_PID: str(executor)},
        text=True,
    )
    assert reaper.stdout is not None
    pid = int(reaper.stdout.readline())
    assert belongs_to(executor)(reaper.pid)
    assert belongs_to(executor)(pid)
    assert not belongs_to(executor + 1)(pid)
    reaper.communicate()


@pytest.mark.parametrize("pid", [0, -1, 2**30])
def test_pids_without_a_process_are_not_ours(pid: int) -> None:
    assert not is_descendant(pid)
