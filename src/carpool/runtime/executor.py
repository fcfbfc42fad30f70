"""The executor process: hands with a line to whoever started it, and the same end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from carpool.core.model import JobId
from carpool.runtime.deathbed import call_oneself, die_with
from carpool.runtime.hands import Executor
from carpool.runtime.reports import Report
from carpool.runtime.wire import (
    devices_from_json,
    line,
    options_from_json,
    order_from_json,
    program_from_json,
    report_to_json,
)

_LONGEST_LINE = 1 << 26


async def serve(end: socket.socket) -> int:
    """Do what comes over the line until it is closed or says stop; the exit code."""
    reader, writer = await asyncio.open_connection(sock=end, limit=_LONGEST_LINE)
    first = await reader.readline()
    if not first:
        return 0
    begin = _parsed(first)
    options = options_from_json(begin["options"])

    def report(report: Report) -> None:
        with contextlib.suppress(ConnectionError, RuntimeError):
            writer.write(line(report_to_json(report)))

    executor = Executor(devices_from_json(begin["devices"]), Path(begin["state"]), options, report)
    stopping = asyncio.create_task(executor.stopped.wait())
    ticking: asyncio.Task[None] | None = None
    listening: asyncio.Task[None] | None = None
    try:
        await executor.start()
        writer.write(line({"report": "Started"}))
        ticking = asyncio.create_task(_tick(executor, options.tick_s))
        listening = asyncio.create_task(_listen(executor, reader))
        ends: set[asyncio.Future[Any]] = {stopping, ticking, listening, executor.broken}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for task in (ticking, listening):
            if task.done():
                task.result()  # a bug of ours shows itself
        if executor.broken.done():
            print(f"carpool: {executor.broken.result()}", file=sys.stderr)  # noqa: T201 - there is nobody else to tell
            return 1
        return 0
    finally:
        stopping.cancel()
        for each in (ticking, listening):
            if each is not None:
                each.cancel()
        await executor.end()
        with contextlib.suppress(ConnectionError, TimeoutError):
            await asyncio.wait_for(writer.drain(), options.grace_s)
        writer.close()


async def _tick(executor: Executor, every_s: float) -> None:
    while True:
        await asyncio.sleep(every_s)
        executor.tick()


async def _listen(executor: Executor, reader: asyncio.StreamReader) -> None:
    while received := await reader.readline():
        value = _parsed(received)
        match value["do"]:
            case "introduce":
                program = program_from_json(value["program"])
                executor.introduce(JobId(value["job"]), program, resume=value["resume"])
            case "carry":
                executor.carry([order_from_json(order) for order in value["orders"]])
            case "stop":
                executor.stop(checkpoint=value["checkpoint"])


def _parsed(received: bytes) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(received)
    return value


def main() -> int:
    """``python -m carpool.runtime.executor FD PARENT``: serve whoever is at the other end of FD."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    die_with(int(sys.argv[2]), signal.SIGTERM)
    call_oneself("carpool-exec")
    end = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(end.fileno(), False)
    return asyncio.run(serve(end))


if __name__ == "__main__":
    sys.exit(main())
