"""MPS daemon: starts, queries and stops NVIDIA's Multi-Process Service for one executor.

The control daemon runs under a reaper, so that it and its server end with the executor, however that ends. Its pipes
and logs are in a private folder with a short name (pipes are sockets, whose paths have at most 108 bytes), never where
a daemon of the machine's owner would look. Percentages are caps, fixed when a client starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from carpool.core.errors import CarpoolError, InputError
from carpool.jobs.devices import LocalDevice
from carpool.runtime.compat.process_lifetime import wait_for_exit

CONTROL = "nvidia-cuda-mps-control"
PERCENTAGE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
_PIPES, _LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
# The daemon renumbers the GPUs visible to it for its clients, which would apply CUDA_VISIBLE_DEVICES once more: so it
# sees all of them, and our workers only ours.
_NOT_INHERITED = (_PIPES, _LOGS, PERCENTAGE, "CUDA_VISIBLE_DEVICES")
_START_S = 10.0
_QUIT_S = 5.0
_GRACE_S = 2.0
_numbers = itertools.count(1)


class MpsUnavailable(CarpoolError):
    """MPS cannot be used; the message says why."""


def find_control() -> str:
    """The control program; `MpsUnavailable` if there is none, or an external daemon is configured."""
    if os.environ.get(_PIPES):
        raise MpsUnavailable(f"{_PIPES} is set: an external MPS daemon is in use, and carpool cannot set its shares")
    found = shutil.which(CONTROL)
    if found is None:
        raise MpsUnavailable(f"{CONTROL} is not on the PATH (it comes with NVIDIA's driver)")
    return found


def with_percentage(environment: Mapping[str, str], percent: int) -> dict[str, str]:
    """The variables of a client with another percentage."""
    return {**environment, PERCENTAGE: str(percent)}


def is_mps_error(error: str) -> bool:
    """Whether a driver's error text is about the MPS service and not about the GPU."""
    return "MPS" in error


def check_lanes(devices: Iterable[LocalDevice], *, mps: bool = True, memory_cap: int = 0) -> None:
    """Raise InputError if a device is a lane of a GPU and this machine or the options do not allow lanes."""
    lane = next((device for device in devices if device.is_lane), None)
    if lane is None:
        return
    problem, way_out = "", "Make MPS available"
    if memory_cap:
        problem, way_out = "jobs under a memory cap take turns on whole GPUs", "Leave out --memory-cap"
    elif not mps:
        problem, way_out = "a lane of a GPU needs MPS, and lanes are turned off", "Use --lanes auto"
    else:
        try:
            find_control()
        except MpsUnavailable as error:
            problem = f"a lane of a GPU needs MPS: {error}"
    if problem:
        whole = f"or name the whole GPU: cuda:{lane.cuda}."
        raise InputError(problem, where=f"devices {lane.name!r}", way_out=f"{way_out}, {whole}")


class MpsDaemon:
    """One control daemon and its folder."""

    def __init__(self, root: Path | None = None) -> None:
        self._root = root or Path(tempfile.gettempdir()) / f"carpool-mps-{os.getuid()}"
        self.folder = self._root / f"{os.getpid()}.{next(_numbers)}"
        self._process: subprocess.Popen[bytes] | None = None
        self._lifeline: int | None = None
        self._control = ""

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def environment(self, percent: int) -> dict[str, str]:
        """Variables that make a process a client with at most so many percent of the GPU's multiprocessors."""
        return with_percentage(self._directories(), percent)

    async def start(self) -> None:
        """Start the daemon and wait until it accepts clients; `MpsUnavailable` if it does not."""
        self._control = find_control()
        self._make_folder()
        theirs, self._lifeline = os.pipe()
        log = os.open(self.folder / "control.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            self._process = subprocess.Popen(  # noqa: ASYNC220 - exec takes a millisecond
                [
                    *(sys.executable, "-P", "-m", "carpool.runtime.process.reaper", str(theirs), str(os.getpid())),
                    *(str(_GRACE_S), "", "--", self._control, "-f"),
                ],
                pass_fds=[theirs],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment(),
                process_group=0,
            )
        finally:
            os.close(theirs)
            os.close(log)
        if not await self._is_listening():
            output = (self.folder / "control.log").read_text(errors="replace").strip()[-300:]
            await self.quit()
            raise MpsUnavailable(f"{CONTROL} did not start: {output or f'no answer within {_START_S:.0f} s'}")

    async def quit(self) -> None:
        if self.is_alive:
            with contextlib.suppress(OSError, TimeoutError):
                await asyncio.wait_for(self._send("quit"), _QUIT_S)
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None
        if self._process is not None:
            await wait_for_exit(self._process)
        shutil.rmtree(self.folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            self._root.rmdir()  # if no other executor uses it

    def _make_folder(self) -> None:
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._root.stat().st_uid != os.getuid():
            raise MpsUnavailable(f"{self._root} belongs to another user")
        clear_stale(self._root)
        for name in ("p", "l"):
            (self.folder / name).mkdir(mode=0o700, parents=True)

    def _directories(self) -> dict[str, str]:
        return {_PIPES: str(self.folder / "p"), _LOGS: str(self.folder / "l")}

    def _environment(self) -> dict[str, str]:
        return {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED} | self._directories()

    async def _is_listening(self) -> bool:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _START_S
        while self.is_alive and loop.time() < deadline:
            if (self.folder / "p" / "control").exists():
                return True
            await asyncio.sleep(0.01)
        return False

    async def _send(self, command: str) -> None:
        client = subprocess.Popen(  # noqa: ASYNC220 - as above
            [self._control],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=self._environment(),
        )
        assert client.stdin is not None
        try:
            client.stdin.write(f"{command}\n".encode())
            client.stdin.close()
            await wait_for_exit(client)
        finally:
            if client.poll() is None:
                client.kill()
                client.wait()


def clear_stale(root: Path) -> list[int]:
    """Kill daemons that dead executors left behind and remove their folders. Returns the killed pids."""
    killed = []
    for folder in root.iterdir() if root.is_dir() else []:
        owner = folder.name.partition(".")[0]
        if not owner.isdecimal() or Path(f"/proc/{owner}").exists():
            continue
        for pid in _daemons_of(folder):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
        shutil.rmtree(folder, ignore_errors=True)
    return killed


def _daemons_of(folder: Path) -> list[int]:
    """MPS daemons and servers whose pipes are in a folder."""
    wanted = f"{_PIPES}={folder / 'p'}".encode()
    found = []
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal():
            continue
        with contextlib.suppress(OSError):
            is_ours = (process / "comm").read_text().startswith(CONTROL[:11])
            if is_ours and wanted in (process / "environ").read_bytes().split(b"\0"):
                found.append(int(process.name))
    return found
