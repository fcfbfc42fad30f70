# ruff: noqa: ASYNC240 - a test may look at files while nothing else goes on
"""The MPS daemon's life, with a small program in its place that opens the same socket and hears the same word."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from carpool.jobs.devices import LocalDevice
from carpool.runtime.sharing.mps_admission import MpsAdmission, PendingWorker
from carpool.runtime.sharing.mps_daemon import CONTROL, MpsDaemon, MpsUnavailable, clear_stale, find_control

DAEMON = f"""#!{sys.executable}
import os, socket, sys
place = os.path.join(os.environ["CUDA_MPS_PIPE_DIRECTORY"], "control")
if "-f" in sys.argv:
    assert os.environ["CUDA_MPS_LOG_DIRECTORY"]
    if os.path.exists("broken"):
        sys.exit("no GPU is willing")
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        sys.exit("clients would choose among those that were chosen")
    server = socket.socket(socket.AF_UNIX)
    server.bind(place)
    server.listen()
    server.accept()[0].recv(99)
else:
    client = socket.socket(socket.AF_UNIX)
    client.connect(place)
    client.send(sys.stdin.readline().encode())
"""
GPU = LocalDevice(0, "cuda:0", "H200", (), 0)


def to_the_end(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an asynchronous test, not for ever."""

    @functools.wraps(test)
    def run(*args: Any, **named: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **named), 60.0))

    return run


@pytest.fixture(autouse=True)
def control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for NVIDIA's program, first on the PATH."""
    program = tmp_path / "bin" / CONTROL
    program.parent.mkdir()
    program.write_text(DAEMON, encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    monkeypatch.chdir(tmp_path)
    return program


@pytest.fixture
def root() -> Path:
    return Path(f"/tmp/carpool-test-{os.getpid()}")  # short: sockets lie in it


@to_the_end
async def test_it_comes_up_serves_and_quits(root: Path) -> None:
    mps = MpsDaemon(root)
    await mps.start()
    was_alive = mps.is_alive
    told = mps.environment(40)
    assert told["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "40"
    assert (Path(told["CUDA_MPS_PIPE_DIRECTORY"]) / "control").exists()
    assert root.stat().st_mode & 0o077 == 0  # nobody else's business
    await mps.quit()
    assert (was_alive, mps.is_alive) == (True, False)
    assert not root.exists()


@to_the_end
async def test_it_sees_all_gpus_where_its_clients_see_some(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    mps = MpsDaemon(root)
    await mps.start()
    was_alive = mps.is_alive
    await mps.quit()
    assert was_alive


@to_the_end
async def test_a_daemon_that_does_not_come_up_says_why(root: Path, tmp_path: Path) -> None:
    (tmp_path / "broken").touch()
    with pytest.raises(MpsUnavailable, match="no GPU is willing"):
        await MpsDaemon(root).start()
    assert not root.exists()


def test_somebody_elses_service_is_left_alone(monkeypatch: pytest.MonkeyPatch, control: Path) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/somewhere")
    with pytest.raises(MpsUnavailable, match="from outside"):
        find_control()
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY")
    control.unlink()
    with pytest.raises(MpsUnavailable, match="not on the PATH"):
        find_control()


def test_what_a_dead_executor_left_is_cleared(root: Path) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    stale, ours = root / f"{dead.pid}.1", root / f"{os.getpid()}.1"
    (stale / "p").mkdir(parents=True)
    ours.mkdir()
    try:
        assert clear_stale(root) == []
        assert not stale.exists()
        assert ours.exists()
    finally:
        ours.rmdir()
        root.rmdir()


# -- the executor's side ----------------------------------------------------------------------------------------------


class Ears:
    """Hears what a gate says."""

    def __init__(self) -> None:
        self.changes = asyncio.Event()
        self.words: list[str] = []

    def gate(self, root: Path, *devices: LocalDevice, wanted: bool = True) -> MpsAdmission:
        return MpsAdmission(
            devices, wanted=wanted, on_change=self.changes.set, tell=self.words.append, make=lambda: MpsDaemon(root)
        )


@to_the_end
async def test_a_machine_without_gpus_needs_no_service(root: Path) -> None:
    gate = Ears().gate(root, LocalDevice(0, "cpu:0", "cpu1", (0,)))
    await gate.start()
    assert not gate.has_lanes
    assert gate.environment(0, 40) == {}
    assert gate.may_start(PendingWorker(("a", 1), 0, 40, 1))
    await gate.stop()


@to_the_end
async def test_without_mps_there_are_no_lanes_and_it_says_why(root: Path, control: Path) -> None:
    control.unlink()
    gate = Ears().gate(root, GPU)
    await gate.start()
    assert not gate.has_lanes
    assert "not on the PATH" in gate.why_not
    assert gate.environment(0, 40) == {}
    assert Ears().gate(root, GPU, wanted=False).why_not == "it is turned off"


@to_the_end
async def test_a_dead_daemon_is_replaced_and_whoever_waits_may_start(root: Path) -> None:
    ears = Ears()
    gate = ears.gate(root, GPU)
    gate.tick()  # before it has begun there is nothing to replace
    await gate.start()
    try:
        gate.tick()
        assert gate._starting is None
        assert ears.words == []
        mps = gate._mps
        assert mps is not None
        assert mps._process is not None
        os.kill(mps._process.pid, signal.SIGKILL)
        mps._process.wait()
        who = PendingWorker(("a", 1), 0, 40, 1)
        assert not gate.may_start(who)
        assert gate.fault(0, "CUDA error", [("b", 1)], [("b", 3)]) is False  # nobody is to blame for that
        gate.tick()
        await asyncio.wait_for(ears.changes.wait(), 20)
        assert gate.admitted() == []  # the client of the old one has not gone yet
        gate.gone(0, ("b", 1))
        assert gate.admitted() == [who]
        assert ears.words == ["NVIDIA's MPS daemon ended and is started again"]
    finally:
        await gate.stop()
    assert not root.exists()
