"""A copy of this process that serves one socket: who reads ahead, and who passes shards beside a worker.

It is forked, so that nothing has to be pickled and it is equal in everything; only its places in open files are its own
(open_files.py). It ends when its parent does, when nobody asks any more, and when what it serves with fails: that is
told in the log, and the parent, which does itself what is missing, meets the same.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import NoReturn

from carpool.runtime.deathbed import call_oneself, die_with
from carpool.runtime.open_files import places, reopen

Serve = Callable[[socket.socket], None]


class Child:
    """The process, and this side of the socket to it. `OSError` where the system allows no more processes."""

    def __init__(self, name: str, serve: Serve) -> None:
        self.socket, theirs = socket.socketpair()
        parent, files = os.getpid(), places()
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
            reopen(files)
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
        die_with(parent)
        call_oneself(name)
        serve(end)
    except Exception:  # noqa: BLE001 - see above
        traceback.print_exc()
    finally:
        os._exit(0)
