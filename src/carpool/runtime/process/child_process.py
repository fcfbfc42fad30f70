"""Forked child process: serves length-prefixed messages on one socket, with its own file offsets."""

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
    """Send something whole."""
    end.sendall(_LENGTH.pack(len(content)))
    end.sendall(content)


def receive_frame(end: socket.socket) -> bytearray | None:
    """What was written; ``None`` if there is nobody any more."""
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


# Parent and child share one place in each of them. A dataset that keeps a file open, goes to a sample and reads it, would
# be moved by others between the two, and read other samples without an error.


_FILES = Path("/proc/self/fd")


def file_offsets() -> dict[int, int]:
    """The place in every plain file that this process reads; to be asked for before it is forked."""
    found: dict[int, int] = {}
    for file in [int(path.name) for path in _FILES.iterdir()]:
        with contextlib.suppress(OSError):  # the listing's own is closed by now
            if _is_read(file):
                found[file] = os.lseek(file, 0, os.SEEK_CUR)
    return found


def reopen_files(file_offsets: Mapping[int, int]) -> None:
    """In the child: open these files anew, under the same numbers and at the same places."""
    for file, at in file_offsets.items():
        with contextlib.suppress(OSError):  # who may not open it any more shares its place, as before
            again = os.open(_FILES / str(file), os.O_RDONLY | os.O_CLOEXEC)
            os.lseek(again, at, os.SEEK_SET)
            os.dup2(again, file, inheritable=os.get_inheritable(file))
            os.close(again)


def _is_read(file: int) -> bool:
    """Whether it is a plain file that is open for reading alone."""
    if not stat.S_ISREG(os.fstat(file).st_mode):
        return False
    return fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY


# It is forked, so that nothing has to be pickled and it is equal in everything; only its places in open files are its own
# (open_files.py). It ends when its parent does, when nobody asks any more, and when what it serves with fails: that is
# told in the log, and the parent, which does itself what is missing, meets the same.


Serve = Callable[[socket.socket], None]


class ChildProcess:
    """The process, and this side of the socket to it. `OSError` where the system allows no more processes."""

    def __init__(self, name: str, serve: Serve) -> None:
        self.socket, theirs = socket.socketpair()
        parent, files = os.getpid(), file_offsets()
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of threads that the child does not have
                self.pid = os.fork()
        except OSError:
            self.socket.close()
            theirs.close()
            raise
        if not self.pid:
            self.socket.close()
            reopen_files(files)
            _live(name, serve, theirs, parent)
        theirs.close()

    def close(self) -> None:
        """End it, and wait until it has."""
        self.socket.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def _live(name: str, serve: Serve, end: socket.socket, parent: int) -> NoReturn:
    try:
        exit_with_parent(parent)
        set_process_name(name)
        serve(end)
    except Exception:  # noqa: BLE001 - see above
        traceback.print_exc()
    finally:
        os._exit(0)
