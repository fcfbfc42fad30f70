"""The socket through which an executor that outlives its callers is reached: found, or made with a new executor."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from carpool.runtime.deathbed import Other

_SOCKET = "executor"
_LOG = "executor.log"
_PID = "executor.pid"


class ExecutorSocket:
    """A folder that only its owner may enter, with a socket in it that only its owner may use."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def is_answered(self) -> bool:
        """Whether somebody is there."""
        end = self.knock()
        if end is not None:
            end.close()
        return end is not None

    def knock(self) -> socket.socket | None:
        """A line to the executor that is there; None where there is none any more."""
        end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with self._place() as place:
                end.connect(place)
        except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError):
            end.close()
            return None
        except BaseException:
            end.close()
            raise
        return end

    def open(self, environment: Mapping[str, str]) -> tuple[socket.socket, subprocess.Popen[bytes]]:
        """Start an executor that waits here, in a session of its own; a line to it."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder.chmod(0o700)
        (self._folder / _SOCKET).unlink(missing_ok=True)
        log = os.open(self._folder / _LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
                with self._place() as place:
                    listener.bind(place)
                (self._folder / _SOCKET).chmod(0o600)
                listener.listen()  # here already, so that the first call is not lost
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "carpool.runtime.executor", str(listener.fileno())],
                    pass_fds=[listener.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, **environment},
                    start_new_session=True,
                )
        finally:
            os.close(log)
        (self._folder / _PID).write_text(str(process.pid), encoding="ascii")
        end = self.knock()
        assert end is not None, "the socket listens since before the executor was started"
        return end, process

    def close(self) -> None:
        """Leave nothing of an executor that has ended but what it said."""
        for name in (_SOCKET, _PID):
            (self._folder / name).unlink(missing_ok=True)

    async def evict(self) -> None:
        """End the executor that is behind the door but does not answer: two must not work on the same jobs."""
        if (pid := self.resident) is not None:
            hung = Other(pid)
            hung.kill()
            await hung.end()

    @property
    def resident(self) -> int | None:
        """The process of the executor that was started last, if it is one that lives."""
        try:
            pid = int((self._folder / _PID).read_text(encoding="ascii"))
            return pid if b"carpool.runtime.executor" in Path(f"/proc/{pid}/cmdline").read_bytes() else None
        except (OSError, ValueError):
            return None

    @property
    def last_words(self) -> str:
        """What executors have said last on their way."""
        with contextlib.suppress(OSError):
            return (self._folder / _LOG).read_text(encoding="utf-8", errors="replace").strip()[-300:]
        return ""

    @contextlib.contextmanager
    def _place(self) -> Iterator[str]:
        """A short name of the socket: there is room for 108 bytes, and folders may lie deep."""
        handle = os.open(self._folder, os.O_PATH | os.O_DIRECTORY)
        try:
            yield f"/proc/self/fd/{handle}/{_SOCKET}"
        finally:
            os.close(handle)
