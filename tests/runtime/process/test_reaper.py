"""The reaper stops and continues all processes of a command, and ends them even while they are stopped."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from carpool.runtime.process.reaper import FREEZE, UNFREEZE

PATIENCE_S = 60.0


def until(holds: Callable[[], bool]) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < give_up
        os.sched_yield()


def children(pid: int) -> list[int]:
    try:
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.fixture
def reaper() -> Iterator[subprocess.Popen[bytes]]:
    theirs, lifeline = os.pipe()
    script = "sh -c 'sleep 1000' & wait"
    command = [
        sys.executable,
        "-P",
        "-m",
        "carpool.runtime.process.reaper",
        str(theirs),
        str(os.getpid()),
        "30",
        "",
        "--",
    ]
    process = subprocess.Popen([*command, "sh", "-c", script], pass_fds=[theirs])
    os.close(theirs)
    try:
        until(lambda: any(children(child) for child in children(process.pid)))
        yield process
    finally:
        os.close(lifeline)
        process.wait()


def test_all_descendants_stop_and_go_on(reaper: subprocess.Popen[bytes]) -> None:
    (shell,) = children(reaper.pid)
    (grandchild,) = children(shell)
    reaper.send_signal(FREEZE)
    until(lambda: state(shell) == state(grandchild) == "T")
    assert reaper.poll() is None
    reaper.send_signal(UNFREEZE)
    until(lambda: "T" not in (state(shell), state(grandchild)))


def test_a_stopped_command_can_be_terminated(reaper: subprocess.Popen[bytes]) -> None:
    (shell,) = children(reaper.pid)
    reaper.send_signal(FREEZE)
    until(lambda: state(shell) == "T")
    reaper.terminate()
    assert reaper.wait(PATIENCE_S) == -signal.SIGTERM
