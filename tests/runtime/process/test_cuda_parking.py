"""Order of driver calls, and what is undone when one fails."""

from __future__ import annotations

import asyncio
import ctypes
import os
from pathlib import Path
from typing import Any

import pytest

from carpool.runtime.compat import cuda_driver
from carpool.runtime.compat.cuda_driver import NOT_SUPPORTED, CudaDriverError
from carpool.runtime.process.cuda_parking import call_driver, cuda_processes, main, park_processes, restore_processes


class FakeLibcuda:
    """Stands for libcuda: keeps the state of every process as the driver's rules demand."""

    def __init__(self, failing: dict[tuple[str, int], int] | None = None) -> None:
        self.failing = failing or {}
        self.states: dict[int, str] = {}

    def cuInit(self, flags: int) -> int:  # noqa: N802 - the driver's name
        return 0

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cuCheckpointProcess"):
            raise AttributeError(name)
        before, after = {
            "Lock": ("running", "locked"),
            "Checkpoint": ("locked", "checkpointed"),
            "Restore": ("checkpointed", "locked"),
            "Unlock": ("locked", "running"),
        }[name.removeprefix("cuCheckpointProcess")]

        def call(pid: ctypes.c_int, arguments: object) -> int:
            if code := self.failing.get((name, pid.value), 0):
                return code
            if self.states.get(pid.value, "running") != before:
                return 401  # CUDA_ERROR_ILLEGAL_STATE
            self.states[pid.value] = after
            return 0

        return call


def use(monkeypatch: pytest.MonkeyPatch, library: FakeLibcuda) -> None:
    monkeypatch.setattr(cuda_driver, "load", lambda: library)


def test_processes_are_parked_and_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, library := FakeLibcuda())
    park_processes([1, 2], cuda_driver)
    assert library.states == {1: "checkpointed", 2: "checkpointed"}
    restore_processes([1, 2], cuda_driver)
    assert library.states == {1: "running", 2: "running"}


@pytest.mark.parametrize("call", ["cuCheckpointProcessLock", "cuCheckpointProcessCheckpoint"])
@pytest.mark.parametrize("pid", [1, 2])
def test_all_processes_run_on_when_one_cannot_be_parked(monkeypatch: pytest.MonkeyPatch, call: str, pid: int) -> None:
    use(monkeypatch, library := FakeLibcuda({(call, pid): NOT_SUPPORTED}))
    with pytest.raises(CudaDriverError) as raised:
        park_processes([1, 2], cuda_driver)
    assert raised.value.code == NOT_SUPPORTED
    assert set(library.states.values()) <= {"running"}


@pytest.mark.parametrize("pid", [1, 2])
def test_all_processes_stay_parked_when_one_cannot_be_restored(monkeypatch: pytest.MonkeyPatch, pid: int) -> None:
    use(monkeypatch, library := FakeLibcuda())
    park_processes([1, 2], cuda_driver)
    library.failing = {("cuCheckpointProcessRestore", pid): 2}
    with pytest.raises(CudaDriverError):
        restore_processes([1, 2], cuda_driver)
    assert library.states == {1: "checkpointed", 2: "checkpointed"}
    library.failing = {}
    restore_processes([1, 2], cuda_driver)
    assert library.states == {1: "running", 2: "running"}


def test_the_helper_names_mps_as_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, FakeLibcuda({("cuCheckpointProcessLock", 7): NOT_SUPPORTED}))
    assert main(["park", "7"]) == 1
    assert "MPS" in capsys.readouterr().out
    assert main(["park", "8"]) == 0
    assert main(["restore", "8"]) == 0


def test_doctor_names_a_driver_without_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FakeLibcuda())
    assert cuda_driver.process_checkpoint_problem() == ""
    monkeypatch.setattr(cuda_driver, "load", object)
    assert "cuCheckpointProcessLock" in cuda_driver.process_checkpoint_problem()


@pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="there is a GPU")
def test_without_a_driver_the_helper_reports_an_error() -> None:
    assert "cuInit" in asyncio.run(call_driver("park", [os.getpid()]))


def test_processes_with_an_open_gpu_are_found(tmp_path: Path) -> None:
    for pid, target in ((1, "/dev/nvidia0"), (2, "/dev/nvidiactl"), (3, "/dev/nvidia12")):
        (tmp_path / str(pid) / "fd").mkdir(parents=True)
        (tmp_path / str(pid) / "fd" / "5").symlink_to(target)
    assert cuda_processes([1, 2, 3, 4], tmp_path) == [1, 3]
