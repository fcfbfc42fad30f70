"""The executor process: hands with a line to whoever started it, and the same end; or a post that outlives callers."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import sys

from carpool.runtime.deathbed import call_oneself, die_with
from carpool.runtime.gpus import number_as_listed
from carpool.runtime.post import Post

LONGEST_LINE = 1 << 26


async def serve(end: socket.socket) -> int:
    """Do what comes over one line until it is closed or says stop; the exit code."""
    post = Post()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, post.end)
    post.answer(*await asyncio.open_connection(sock=end, limit=LONGEST_LINE))
    return await post.attend()


async def wait(listener: socket.socket) -> int:
    """Do what those say who call one after another, and wait for the next in between; the exit code."""
    post = Post()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, post.retire)
    server = await asyncio.start_unix_server(post.answer, sock=listener, limit=LONGEST_LINE)
    try:
        return await post.attend()
    finally:
        server.close()


def main() -> int:
    """``python -m carpool.runtime.executor FD [PARENT]``: serve PARENT at the other end of FD, or all who call."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    call_oneself("carpool-exec")
    number_as_listed()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # every job has a log and mirrors
    end = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(end.fileno(), False)
    if len(sys.argv) == 2:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the terminal of whoever started it may go
        return asyncio.run(wait(end))
    die_with(int(sys.argv[2]), signal.SIGTERM)
    return asyncio.run(serve(end))


if __name__ == "__main__":
    sys.exit(main())
