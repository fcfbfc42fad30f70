"""Start of a command: a plain process under the reaper, or a fork of the fork server for a Python program."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from carpool.jobs.program import Program
from carpool.runtime.compat.interpreter import fork_start_problem
from carpool.runtime.compat.process_lifetime import wait_for_exit
from carpool.runtime.process.channel import AsyncChannel, Closed, ProtocolError, pair
from carpool.runtime.process.protocol import Exited, Forked
from carpool.runtime.process.python_program import is_same_interpreter, parse_program, uses_torch

RunInFork = Callable[
    ..., Awaitable[tuple[AsyncChannel, Forked]]
]  # RunProgram and descriptors: `WorkerPool.run_program`


class Descriptors(NamedTuple):
    """Descriptors that a command gets; they stay the caller's."""

    log: int
    lifeline: int  # when its other end is closed, everything is killed
    session: int


class StartedCommand(Protocol):
    """A command under its reaper."""

    pid: int  # of the reaper

    def terminate(self) -> None: ...

    async def wait(self) -> int:
        """The exit code, negative for a signal, once all processes have exited."""


class SpawnedCommand:
    """A command that was started as a plain process."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.pid = process.pid
        self._process = process

    def terminate(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    async def wait(self) -> int:
        await wait_for_exit(self._process)
        return self._process.wait()


class ForkedCommand:
    """A command in a fork of the fork server; its reaper is not a child of this process."""

    def __init__(self, channel: AsyncChannel, pid: int) -> None:
        self.pid = pid
        self._channel = channel
        self._has_exited = False

    def terminate(self) -> None:
        if not self._has_exited:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)

    async def wait(self) -> int:
        try:
            message = (await self._channel.receive()).message
            return message.code if isinstance(message, Exited) else -signal.SIGKILL
        except (Closed, ProtocolError):  # the reaper was killed, and its processes with it
            return -signal.SIGKILL
        finally:
            self._has_exited = True
            self._channel.close()


def start_progress_reader(pattern: str, log: Path, start: int) -> tuple[subprocess.Popen[bytes], AsyncChannel]:
    """Start the process that finds a pattern in a log from a byte on; it exits when the channel is closed."""
    ours, theirs = pair()
    with theirs:
        arguments = [str(theirs.fileno()), str(os.getpid()), str(start), str(log), pattern]
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "carpool.runtime.process.progress_reader", *arguments],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            process_group=0,
        )
    return process, AsyncChannel(ours)


def command_line(program: Program) -> list[str]:
    """The command, with its interpreter in place of a leading ``python``."""
    command = list(program.command)
    if Path(command[0]).name in {"python", "python3"} and "/" not in command[0]:
        command[0] = program.python or sys.executable
    return command


def spawn(
    command: Sequence[str],
    folder: Path,
    environment: dict[str, str],
    cores: Sequence[int],
    grace_s: float,
    fds: Descriptors,
) -> SpawnedCommand:
    """Start a command as a plain process. OSError or ValueError if that is impossible."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-P", "-m", "carpool.runtime.process.reaper"),
            *(str(fds.lifeline), str(os.getpid()), str(grace_s), ",".join(map(str, cores)), "--"),
            *command,
        ],
        pass_fds=[fds.lifeline, fds.session],
        stdin=subprocess.DEVNULL,
        stdout=fds.log,
        stderr=fds.log,
        cwd=folder,
        env=environment | {"CARPOOL_CHANNEL": str(fds.session)},
        process_group=0,
    )
    return SpawnedCommand(process)


def can_fork(program: Program, command: Sequence[str], folder: Path) -> bool:
    """Whether a command looks like a torch program for this interpreter; the fork checks the rest."""
    if not program.fork_start or fork_start_problem() or not is_same_interpreter(command[0]):
        return False
    python_program = parse_program(command)
    return python_program is not None and uses_torch(python_program, folder)
