# ruff: noqa: ASYNC240 - a test may block on files
"""The MPS daemon and admission, with a stand-in for NVIDIA's control program."""

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

from carpool.core.errors import InputError
from carpool.jobs.devices import LocalDevice
from carpool.runtime.sharing.mps_admission import MpsAdmission, PendingWorker
from carpool.runtime.sharing.mps_daemon import (
    CONTROL,
    MpsDaemon,
    MpsUnavailable,
    check_lanes,
    clear_stale,
    find_control,
)

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
    """Run an asynchronous test with a timeout."""

    @functools.wraps(test)
    def run(*args: Any, **named: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **named), 60.0))

    return run


@pytest.fixture(autouse=True)
def control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for NVIDIA's control program, first on the PATH."""
    program = tmp_path / "bin" / CONTROL
    program.parent.mkdir()
    program.write_text(DAEMON, encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    monkeypatch.chdir(tmp_path)
    return program


@pytest.mark.parametrize(
    ("options", "words"),
    [({"mps": False}, "--lanes auto"), ({"memory_cap": 1}, "--memory-cap"), ({}, "not on the PATH")],
)
def test_a_lane_that_cannot_be_had_is_refused(control: Path, options: dict[str, Any], words: str) -> None:
    lane = LocalDevice(1, "cuda:0@50", "H200@50", (), 0, lane_percent=50)
    check_lanes([GPU], **options)
    if options:
        check_lanes([GPU, lane])
    else:
        control.unlink()
    with pytest.raises(InputError, match=words) as caught:
        check_lanes([GPU, lane], **options)
    assert all(word in str(caught.value) for word in ("cuda:0@50", "name the whole GPU: cuda:0."))


@pytest.fixture
def root() -> Path:
    return Path(f"/tmp/carpool-test-{os.getpid()}")  # short: sockets lie in it


@to_the_end
async def test_the_daemon_starts_and_quits(root: Path) -> None:
    mps = MpsDaemon(root)
    await mps.start()
    was_alive = mps.is_alive
    environment = mps.environment(40)
    assert environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "40"
    assert (Path(environment["CUDA_MPS_PIPE_DIRECTORY"]) / "control").exists()
    assert root.stat().st_mode & 0o077 == 0  # private
    await mps.quit()
    assert (was_alive, mps.is_alive) == (True, False)
    assert not root.exists()


@to_the_end
async def test_the_daemon_sees_all_gpus(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    mps = MpsDaemon(root)
    await mps.start()
    was_alive = mps.is_alive
    await mps.quit()
    assert was_alive


@to_the_end
async def test_a_daemon_that_does_not_start_reports_why(root: Path, tmp_path: Path) -> None:
    (tmp_path / "broken").touch()
    with pytest.raises(MpsUnavailable, match="no GPU is willing"):
        await MpsDaemon(root).start()
    assert not root.exists()


def test_an_external_daemon_or_a_missing_program_makes_mps_unavailable(
    monkeypatch: pytest.MonkeyPatch, control: Path
) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/somewhere")
    with pytest.raises(MpsUnavailable, match="external"):
        find_control()
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY")
    control.unlink()
    monkeypatch.setenv("PATH", str(control.parent))  # without a real control program of this machine
    with pytest.raises(MpsUnavailable, match="not on the PATH"):
        find_control()


def test_folders_of_dead_executors_are_removed(root: Path) -> None:
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


# -- admission -------------------------------------------------------------------------------------------------------


class Recorder:
    """Records the notes and changes of an admission."""

    def __init__(self) -> None:
        self.changes = asyncio.Event()
        self.notes: list[str] = []

    def admission(self, root: Path, *devices: LocalDevice, enabled: bool = True) -> MpsAdmission:
        return MpsAdmission(
            devices,
            enabled=enabled,
            on_change=self.changes.set,
            note=self.notes.append,
            make_daemon=lambda: MpsDaemon(root),
        )


@to_the_end
async def test_a_machine_without_gpus_needs_no_daemon(root: Path) -> None:
    mps = Recorder().admission(root, LocalDevice(0, "cpu:0", "cpu1", (0,)))
    await mps.start()
    assert not mps.has_lanes
    assert mps.environment(0, 40) == {}
    assert mps.admit(PendingWorker(("a", 1), 0, 40, 1))
    await mps.stop()


@to_the_end
async def test_without_mps_there_are_no_lanes_and_a_reason(
    root: Path, control: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    control.unlink()
    monkeypatch.setenv("PATH", str(control.parent))  # without a real control program of this machine
    mps = Recorder().admission(root, GPU)
    await mps.start()
    assert not mps.has_lanes
    assert "not on the PATH" in mps.unavailable
    assert mps.environment(0, 40) == {}
    assert Recorder().admission(root, GPU, enabled=False).unavailable == "MPS is turned off"


@to_the_end
async def test_a_dead_daemon_is_restarted_and_waiting_workers_start(root: Path) -> None:
    recorder = Recorder()
    mps = recorder.admission(root, GPU)
    mps.tick()  # not started yet
    await mps.start()
    try:
        mps.tick()
        assert mps._restarting is None
        assert recorder.notes == []
        daemon = mps._daemon
        assert daemon is not None
        assert daemon._process is not None
        os.kill(daemon._process.pid, signal.SIGKILL)
        daemon._process.wait()
        worker = PendingWorker(("a", 1), 0, 40, 1)
        assert not mps.admit(worker)
        assert mps.on_fault(0, "CUDA error", [("b", 1)], [("b", 3)]) is False  # no job is to blame
        mps.tick()
        await asyncio.wait_for(recorder.changes.wait(), 20)
        assert mps.take_admitted() == []  # a client of the old daemon has not exited yet
        mps.on_exit(0, ("b", 1))
        assert mps.take_admitted() == [worker]
        assert len(recorder.notes) == 1
    finally:
        await mps.stop()
    assert not root.exists()
