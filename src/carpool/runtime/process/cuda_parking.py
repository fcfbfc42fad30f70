"""CUDA parking: moves the GPU state of other processes to host memory and back, through the driver.

``python -m carpool.runtime.process.cuda_parking park|restore PID…`` prints the error, if there is one, and exits with
code 1. It is a process of its own: a driver call that hangs can be killed, and the executor never initializes CUDA.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from carpool.runtime.compat import cuda_driver
from carpool.runtime.compat.cuda_driver import NOT_SUPPORTED, CudaDriverError
from carpool.runtime.compat.process_lifetime import wait_for_exit

_LOCK_S = 60.0  # for the work that a process has launched
_GPU_FILE = re.compile(r"/dev/nvidia\d+")


class CheckpointDriver(Protocol):
    """The driver calls that parking needs; each may raise `CudaDriverError`."""

    def lock_process(self, pid: int, timeout_s: float) -> None: ...

    def checkpoint_process(self, pid: int) -> None: ...

    def restore_process(self, pid: int) -> None: ...

    def unlock_process(self, pid: int) -> None: ...


def cuda_processes(pids: Iterable[int], proc: Path = Path("/proc")) -> list[int]:
    """Those of these processes that have a GPU open."""
    return [pid for pid in pids if any(map(_GPU_FILE.fullmatch, _open_files(proc / str(pid) / "fd")))]


def _open_files(folder: Path) -> Iterator[str]:
    with contextlib.suppress(OSError):  # it has exited
        for link in folder.iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                yield str(link.readlink())


def park_processes(pids: Sequence[int], driver: CheckpointDriver) -> None:
    """Lock all processes, then checkpoint each. `CudaDriverError` if one refuses; then all keep running."""
    locked: list[int] = []
    saved: list[int] = []
    try:
        for pid in pids:
            driver.lock_process(pid, _LOCK_S)
            locked.append(pid)
        for pid in pids:
            driver.checkpoint_process(pid)
            saved.append(pid)
    except CudaDriverError:
        for pid in saved:
            driver.restore_process(pid)
        for pid in locked:
            driver.unlock_process(pid)
        raise


def restore_processes(pids: Sequence[int], driver: CheckpointDriver) -> None:
    """Restore all processes, then unlock them. `CudaDriverError` if one refuses; then all stay checkpointed."""
    restored: list[int] = []
    try:
        for pid in pids:
            driver.restore_process(pid)
            restored.append(pid)
    except CudaDriverError:
        for pid in restored:
            driver.checkpoint_process(pid)
        raise
    for pid in pids:
        driver.unlock_process(pid)


async def call_driver(action: str, pids: Sequence[int]) -> str:
    """Park or restore processes in a helper process. Returns the error, empty on success."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_MPS_")}
    helper = subprocess.Popen(  # noqa: ASYNC220 - exec takes a millisecond, and no thread may be started
        [sys.executable, "-P", "-m", "carpool.runtime.process.cuda_parking", action, *map(str, pids)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env=environment,
        process_group=0,
    )
    try:
        await wait_for_exit(helper)
    finally:
        if helper.poll() is None:
            helper.kill()
            helper.wait()
    assert helper.stdout is not None
    with helper.stdout:
        words = helper.stdout.read().decode(errors="replace").strip()
    return words or (f"the helper process ended with code {helper.returncode}" if helper.returncode else "")


def main(arguments: Sequence[str]) -> int:
    """Carry out one action on the processes named."""
    action, *pids = arguments
    carry_out = {"park": park_processes, "restore": restore_processes}[action]
    try:
        carry_out([int(pid) for pid in pids], cuda_driver)
    except CudaDriverError as error:
        why = "; processes under MPS cannot be checkpointed" if error.code == NOT_SUPPORTED else ""
        print(f"{error}{why}")  # noqa: T201 - the executor reads it
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
