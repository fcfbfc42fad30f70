"""Executor process: runs jobs on this machine for one client, or as a server that outlives its clients."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from carpool.core.model import JobId
from carpool.jobs.devices import use_pci_bus_order
from carpool.runtime.compat.process_lifetime import exit_with_parent, set_process_name
from carpool.runtime.executor.client_protocol import (
    Inventory,
    devices_from_json,
    inventory_to_json,
    json_line,
    options_from_json,
    order_from_json,
    program_from_json,
    report_to_json,
)
from carpool.runtime.executor.context import ExecutorDependencies
from carpool.runtime.executor.executor import Executor
from carpool.runtime.executor.reports import NumberedReport, Outbox, Report

_UNCLAIMED_S = 60.0  # for the first claim, which comes at once


class ExecutorServer:
    """One executor and those who claim it, one after another, each with a higher epoch than the one before.

    The first claim says on which devices and how. An older claim is refused, a newer one cuts the line of the one
    before. With nobody at the other end the executor stops (`on_orphan` = exit), or lets all jobs stand still and
    waits: their states are on disk, and after `orphan_s` it ends by itself.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._outbox = Outbox()
        self._epoch = self._life = 0
        self._writer: asyncio.StreamWriter | None = None  # of whoever has claimed it
        self._is_answered = False  # the claim has been: reports may follow
        self._expects_another = False  # whoever left said so
        self._alone_since = self._beaten_at = clock()
        self._beat_s = 0.0  # between signs of life, where whoever has claimed it wants some
        self._starting: asyncio.Task[None] | None = None
        self._executor: Executor | None = None
        self._tasks: list[asyncio.Task[Any]] = []
        self._calls: set[asyncio.Task[None]] = set()
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def attend(self) -> int:
        """Serve until it is over; the exit code."""
        asyncio.get_running_loop().call_later(_UNCLAIMED_S, self._give_up)
        try:
            return await self._ended
        finally:
            for task in filter(None, (self._starting, *self._tasks)):
                task.cancel()
            if self._executor is not None:
                await self._executor.end()
            await self._hang_up()
            for call in self._calls:
                call.cancel()
            await asyncio.gather(*self._calls, return_exceptions=True)

    def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Somebody calls."""
        task = asyncio.create_task(self._converse(reader, writer))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One caller, from the claim to the end of the line."""
        try:
            claim = await _next(reader)
            if claim is None or not self._is_newer(claim, writer):
                return
            if self._executor is None:
                self._begin(claim)
            assert self._starting is not None
            await asyncio.shield(self._starting)
            if self._writer is writer:
                self._introduce_oneself(claim)
                await self._listen(reader, writer)
        except ConnectionError:
            pass
        except Exception as error:  # noqa: BLE001 - a bug of ours shows itself, and is not swallowed by the server
            self._end(error)
        finally:
            if self._writer is writer:
                self._left()
            writer.close()

    # -- claims -------------------------------------------------------------------------------------------------------

    def _is_newer(self, claim: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        if claim["epoch"] <= self._epoch:
            writer.write(json_line({"report": "Refused", "epoch": self._epoch}))
            return False
        self._epoch = claim["epoch"]
        before, self._writer, self._is_answered = self._writer, writer, False
        if before is not None:
            before.close()
            self._left_alone()
        return True

    def _begin(self, claim: dict[str, Any]) -> None:
        self._life = self._epoch
        self._options = options_from_json(claim["options"])
        self._devices = devices_from_json(claim["devices"])
        self._executor = Executor(
            self._devices, Path(claim["state"]), self._options, self._report, ExecutorDependencies(clock=self._clock)
        )
        if self._waits:
            self._executor.wait()
        self._starting = asyncio.create_task(self._start(self._executor))

    async def _start(self, executor: Executor) -> None:
        await executor.start()
        stopping = asyncio.create_task(executor.stopped.wait())
        stopping.add_done_callback(lambda task: None if task.cancelled() else self._end(0))
        executor.broken.add_done_callback(lambda broken: self._end(broken.result()))
        ticking = asyncio.create_task(self._tick(executor))
        ticking.add_done_callback(lambda task: None if task.cancelled() else self._end(task.exception()))
        self._tasks = [stopping, ticking]

    def _introduce_oneself(self, claim: dict[str, Any]) -> None:
        """Tell a new caller how things stand, and then all that it has not heard."""
        assert self._executor is not None
        if claim["life"] == self._life:
            self._outbox.acknowledge(claim["after"])
        standings = self._executor.jobs.standings()
        inventory = Inventory(os.getpid(), self._life, tuple(self._devices), standings)
        self._beat_s = claim.get("beat_s", 0.0)  # an older carpool would not understand them
        self._say({"report": "Claimed", "beat_s": self._beat_s, **inventory_to_json(inventory)})
        self._is_answered = True
        for numbered in self._outbox:
            self._send(numbered)

    def _left(self) -> None:
        """Nobody is there any more."""
        self._writer, self._is_answered = None, False
        self._left_alone()
        if not self._waits:
            self._end(0)

    def _left_alone(self) -> None:
        self._alone_since = self._clock()
        if self._waits and self._executor is not None and not self._expects_another:
            self._executor.wait()

    @property
    def _waits(self) -> bool:
        return self._executor is not None and self._options.on_orphan == "wait"

    # -- what is said -------------------------------------------------------------------------------------------------

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        executor = self._executor
        assert executor is not None
        while (value := await _next(reader)) is not None and self._writer is writer:
            match value["do"]:
                case "introduce":
                    program = program_from_json(value["program"])
                    executor.introduce(JobId(value["job"]), program, resume=value["resume"])
                case "carry":
                    executor.carry([order_from_json(order) for order in value["orders"]])
                case "forget":
                    executor.forget(JobId(value["job"]))
                case "acknowledge":
                    self._outbox.acknowledge(value["number"])
                case "proceed":
                    self._expects_another = False
                    executor.proceed()
                case "leave":
                    self._expects_another = True
                case "stop":
                    executor.stop(checkpoint=value["checkpoint"])

    def _report(self, report: Report) -> None:
        numbered = self._outbox.put(report)
        if self._is_answered:
            self._send(numbered)
            if not self._waits:  # nobody else will ever ask for it
                self._outbox.acknowledge(numbered.number)

    def _send(self, numbered: NumberedReport) -> None:
        self._say({"number": numbered.number, **report_to_json(numbered.report)})

    def _say(self, value: dict[str, Any]) -> None:
        if self._writer is not None:
            with contextlib.suppress(ConnectionError, RuntimeError):
                self._writer.write(json_line(value))

    # -- time, and the end --------------------------------------------------------------------------------------------

    async def _tick(self, executor: Executor) -> None:
        while True:
            await asyncio.sleep(self._options.tick_s)
            executor.tick()
            self._beat()
            alone_s = 0.0 if self._writer is not None else self._clock() - self._alone_since
            if self._expects_another and alone_s > self._options.handover_s:
                self._expects_another = False
                executor.wait()
            if self._waits and alone_s > self._patience_s(executor):
                self.retire()

    def _beat(self) -> None:
        """Say that it is at work, although there is nothing to say; from the loop, since that is what may hang."""
        if self._is_answered and self._beat_s and self._clock() - self._beaten_at >= self._beat_s:
            self._beaten_at = self._clock()
            self._say({"report": "Alive"})

    def _patience_s(self, executor: Executor) -> float:
        """How long to wait for somebody; with nothing to hand over not for long."""
        options = self._options
        has_something = len(self._outbox) or not executor.jobs.is_over
        return options.orphan_s if has_something else min(options.orphan_s, options.handover_s)

    def retire(self) -> None:
        """Keep all states on disk and end."""
        if self._executor is None or self._starting is None or not self._starting.done():
            self._end(0)
        else:
            self._alone_since = self._clock()  # once
            self._executor.stop(checkpoint=True)

    def end(self) -> None:
        """End with everything that it started: whoever it worked for has died."""
        self._end(0)

    def _give_up(self) -> None:
        """Nobody has ever claimed it: whoever started it died at once."""
        if self._executor is None:
            self._end(0)

    def _end(self, why: int | str | BaseException | None) -> None:
        """With an exit code, words for people, or a bug of ours."""
        if self._ended.done():
            return
        if isinstance(why, BaseException):
            self._ended.set_exception(why)
        elif isinstance(why, str):
            print(f"carpool: {why}", file=sys.stderr)  # noqa: T201 - there is nobody else to tell
            self._ended.set_result(1)
        else:
            self._ended.set_result(why or 0)

    async def _hang_up(self) -> None:
        writer = self._writer  # whoever is at the other end may leave while this waits
        if writer is not None:
            with contextlib.suppress(ConnectionError, TimeoutError):
                await asyncio.wait_for(writer.drain(), self._options.grace_s)
            writer.close()


async def _next(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    received = await reader.readline()
    if not received.endswith(b"\n"):
        return None
    value: dict[str, Any] = json.loads(received)
    return value


MAX_LINE_BYTES = 1 << 26


async def serve_client(end: socket.socket) -> int:
    """Do what comes over one line until it is closed or says stop; the exit code."""
    post = ExecutorServer()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, post.end)
    post.answer(*await asyncio.open_connection(sock=end, limit=MAX_LINE_BYTES))
    return await post.attend()


async def serve_clients(listener: socket.socket) -> int:
    """Do what those say who call one after another, and wait for the next in between; the exit code."""
    post = ExecutorServer()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, post.retire)
    server = await asyncio.start_unix_server(post.answer, sock=listener, limit=MAX_LINE_BYTES)
    try:
        return await post.attend()
    finally:
        server.close()


def main() -> int:
    """``python -m carpool.runtime.executor.server FD [PARENT]``: serve PARENT at the other end of FD, or all who call."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    set_process_name("carpool-exec")
    use_pci_bus_order()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # every job has a log and mirrors
    end = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(end.fileno(), False)
    if len(sys.argv) == 2:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the terminal of whoever started it may go
        return asyncio.run(serve_clients(end))
    exit_with_parent(int(sys.argv[2]), signal.SIGTERM)
    return asyncio.run(serve_client(end))


if __name__ == "__main__":
    sys.exit(main())
