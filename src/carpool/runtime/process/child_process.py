"""Forked child process: serves length-prefixed messages on one socket, with its own file offsets.

It is forked, so that nothing has to be pickled. Parent and child would share the offset of every open file: a dataset
that seeks and reads would silently read other samples, so the child reopens plain files. It exits with its parent, when
its socket is closed, and when it fails: the traceback goes to the log and the parent does the work itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import stat
import struct
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

from carpool.runtime.compat.process_lifetime import exit_with_parent, set_process_name

_LENGTH = struct.Struct("<Q")


def send_frame(end: socket.socket, content: bytes) -> None:
    """Send one length-prefixed message."""
    end.sendall(_LENGTH.pack(len(content)))
    end.sendall(content)


def receive_frame(end: socket.socket) -> bytearray | None:
    """The next message; ``None`` if the other side is closed."""
    head = _exactly(end, _LENGTH.size)
    return None if head is None else _exactly(end, _LENGTH.unpack(head)[0])


def _exactly(end: socket.socket, size: int) -> bytearray | None:
    content = bytearray(size)
    view = memoryview(content)
    while view:
        try:
            count = end.recv_into(view)
        except OSError:
            return None
        if not count:
            return None
        view = view[count:]
    return content


_FILES = Path("/proc/self/fd")


def file_offsets() -> dict[int, int]:
    """The offset of every plain file that is open for reading; call it before the fork."""
    found: dict[int, int] = {}
    for file in [int(path.name) for path in _FILES.iterdir()]:
        with contextlib.suppress(OSError):  # the listing's own descriptor is closed by now
            if _is_read(file):
                found[file] = os.lseek(file, 0, os.SEEK_CUR)
    return found


def reopen_files(file_offsets: Mapping[int, int]) -> None:
    """In the child: reopen these files under the same descriptors and at the same offsets."""
    for file, at in file_offsets.items():
        with contextlib.suppress(OSError):  # without permission to reopen, the offset stays shared
            again = os.open(_FILES / str(file), os.O_RDONLY | os.O_CLOEXEC)
            os.lseek(again, at, os.SEEK_SET)
            os.dup2(again, file, inheritable=os.get_inheritable(file))
            os.close(again)


def _is_read(file: int) -> bool:
    """Whether it is a plain file, open for reading only."""
    if not stat.S_ISREG(os.fstat(file).st_mode):
        return False
    return fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY


Serve = Callable[[socket.socket], None]


class ChildProcess:
    """The process and the parent's end of its socket. Raises `OSError` if the system allows no more processes."""

    def __init__(self, name: str, serve: Serve) -> None:
        self.socket, theirs = socket.socketpair()
        parent, files = os.getpid(), file_offsets()
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # about threads, which the child does not use
                self.pid = os.fork()
        except OSError:
            self.socket.close()
            theirs.close()
            raise
        if not self.pid:
            self.socket.close()
            reopen_files(files)
            _run(name, serve, theirs, parent)
        theirs.close()

    def close(self) -> None:
        self.socket.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def _run(name: str, serve: Serve, end: socket.socket, parent: int) -> NoReturn:
    try:
        exit_with_parent(parent)
        set_process_name(name)
        serve(end)
    except Exception:  # noqa: BLE001 - see above
        traceback.print_exc()
    finally:
        os._exit(0)
