"""The near end of an executor process: starts it, passes orders on, hears what comes back."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from carpool.core.errors import CarpoolError
from carpool.core.messages import Order
from carpool.core.model import JobId
from carpool.runtime.devices import LocalDevice
from carpool.runtime.program import Program
from carpool.runtime.reports import Gone, Report
from carpool.runtime.wire import ExecutorOptions, line, order_to_json, report_from_json

__all__ = ["ExecutorLink", "ExecutorOptions"]

_LONGEST_LINE = 1 << 26
_START_S = 180.0  # importing torch from a cold disk takes its time
_STOP_S = 20.0  # for a stop without checkpoints, which is quick


class ExecutorLink:
    """An executor in a process of its own, which ends with this one."""

    def __init__(self, process: subprocess.Popen[bytes], end: socket.socket) -> None:
        self._process = process
        self._end = end
        self._gone: Gone | None = None

    @classmethod
    async def start(
        cls, devices: Sequence[LocalDevice], state: Path, *, options: ExecutorOptions | None = None
    ) -> ExecutorLink:
        """Start one for these devices; its jobs' folders are made under ``state``."""
        options = options or ExecutorOptions()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            process = subprocess.Popen(  # noqa: ASYNC220 - exec takes a millisecond
                [sys.executable, "-P", "-m", "carpool.runtime.executor", str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **options.environment},
                process_group=0,  # Ctrl-C in the terminal is for whoever started it
            )
        link = cls(process, ours)
        link._reader, link._writer = await asyncio.open_connection(sock=ours, limit=_LONGEST_LINE)
        link._say(
            {
                "do": "begin",
                "devices": [asdict(device) for device in devices],
                "state": str(state),
                "options": asdict(options),
            }
        )
        try:
            first = await asyncio.wait_for(link._next(), _START_S)
        except TimeoutError:
            first = None
        if first is None:
            reason = await link._bury()
            raise CarpoolError(f"the executor did not start: {reason}. What it said stands on stderr.")
        return link

    _reader: asyncio.StreamReader
    _writer: asyncio.StreamWriter

    @property
    def pid(self) -> int:
        """The executor's process."""
        return self._process.pid

    def introduce(self, job: JobId, program: Program, *, resume: bool = False) -> None:
        """Make a job known before its first order; with ``resume`` it goes on from what its folder holds."""
        self._say({"do": "introduce", "job": job, "program": asdict(program), "resume": resume})

    def carry(self, orders: Sequence[Order]) -> None:
        """Pass orders on."""
        self._say({"do": "carry", "orders": [order_to_json(order) for order in orders]})

    async def receive(self) -> Report:
        """The next report; `Gone`, again and again, once there is no executor any more."""
        while self._gone is None:
            value = await self._next()
            if value is None:
                self._gone = Gone(await self._bury())
            else:
                return report_from_json(value)
        return self._gone

    async def stop(self, *, checkpoint: bool) -> None:
        """Halt all jobs at a step boundary, keep their state if asked to, and end the executor.

        Somebody should go on receiving meanwhile, or the last reports are lost.
        """
        self._say({"do": "stop", "checkpoint": checkpoint})
        await self._end_of_process(None if checkpoint else _STOP_S)

    def kill(self) -> None:
        """End the executor, and with it all it started, in the middle of whatever they do; `receive` says `Gone`."""
        self._process.kill()

    def _say(self, value: Mapping[str, Any]) -> None:
        with contextlib.suppress(ConnectionError, RuntimeError):  # its end is seen by `receive`
            self._writer.write(line(value))

    async def _next(self) -> dict[str, Any] | None:
        try:
            received = await self._reader.readline()
        except (ConnectionError, ValueError):
            return None
        if not received.endswith(b"\n"):
            return None
        value: dict[str, Any] = json.loads(received)
        return value

    async def _bury(self) -> str:
        self._writer.close()
        await self._end_of_process(_STOP_S)
        code = self._process.returncode
        return f"killed by signal {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    async def _end_of_process(self, patience_s: float | None) -> None:
        """Wait for its end, without a thread; when patience ends, end it."""
        if self._process.poll() is not None:
            return
        loop = asyncio.get_running_loop()
        handle = os.pidfd_open(self._process.pid)
        ended: asyncio.Future[None] = loop.create_future()
        loop.add_reader(handle, _resolve, ended)
        try:
            await asyncio.wait_for(asyncio.shield(ended), patience_s)
        except TimeoutError:
            self._process.kill()
            await ended
        finally:
            loop.remove_reader(handle)
            os.close(handle)
        self._process.wait()


def _resolve(waited_for: asyncio.Future[None]) -> None:
    if not waited_for.done():
        waited_for.set_result(None)
