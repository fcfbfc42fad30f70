"""Executor process: runs jobs on this machine for one client, or as a server that outlives its clients.

It logs one line per order, worker launch and exit, fault and recovery. As a server it logs to its stderr, which its
starter has redirected to ``executor.log``; for a single client, whose terminal it shares, to ``executor.log`` in the
state folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import logging.handlers
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from pathlib import Path
from typing import Any

from carpool.core.model import JobId
from carpool.jobs.devices import use_pci_bus_order
from carpool.jobs.program import Program
from carpool.logs import configure_logging, log_event
from carpool.runtime.compat.process_lifetime import exit_with_parent, set_process_name
from carpool.runtime.executor.client_protocol import (
    ExecutorOptions,
    Inventory,
    devices_from_json,
    json_line,
    order_from_json,
    report_to_json,
)
from carpool.runtime.executor.executor import Executor
from carpool.runtime.executor.lease import Lease
from carpool.runtime.executor.reports import NumberedReport, Outbox, Report, Sized
from carpool.runtime.executor.training_workers import ExecutorDependencies
from carpool.runtime.process.launch import Launched
from carpool.runtime.process.shared_memory import boot_clock
from carpool.runtime.remote.remote_worker_stream import peer_from_json

MAX_LINE_BYTES = 1 << 26
_FIRST_CLAIM_S = 60.0
_log = logging.getLogger(__name__)


class ExecutorServer:
    """Serves an executor to clients that claim it one after another, each with a higher epoch.

    The first claim configures the executor. A claim with an older epoch is refused, a newer one closes the connection
    of the client before. Without a client the executor exits (``on_orphan`` = exit), or suspends all jobs with their
    states on disk and waits; after ``orphan_s`` it exits.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        *,
        log_in_state: bool = False,
        forkserver: Launched | None = None,  # for the executor, which otherwise launches one
    ) -> None:
        self._clock = clock
        self._forkserver = forkserver
        self._log_in_state = log_in_state  # and not on stderr
        self._outbox = Outbox()
        self._epoch = self._life = 0
        self._writer: asyncio.StreamWriter | None = None  # of the current client
        self._is_claim_answered = False  # reports may follow
        self._expects_client = False  # the last client announced another one
        self._alone_since = self._beat_at = clock()
        self._lease = Lease(0.0, 0.0)
        self._is_fenced = False  # the lease has expired, and all jobs are suspended
        self._beat_s = 0.0  # heartbeat interval that the client asked for; 0: none
        self._starting: asyncio.Task[None] | None = None
        self._executor: Executor | None = None
        self._tasks: list[asyncio.Task[Any]] = []
        self._connections: set[asyncio.Task[None]] = set()
        self._exit: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def run(self) -> int:
        """Serve until the executor ends. Returns the exit code."""
        asyncio.get_running_loop().call_later(_FIRST_CLAIM_S, self._exit_if_unclaimed)
        try:
            return await self._exit
        finally:
            for task in filter(None, (self._starting, *self._tasks)):
                task.cancel()
            if self._executor is not None:
                await self._executor.close()
            elif self._forkserver is not None:
                self._forkserver.kill()
            await self._close_writer()
            for connection in self._connections:
                connection.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)

    def on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            claim = await _next(reader)
            if claim is not None and "workers" in claim:
                await self._host_workers(claim, reader, writer)
                return
            if claim is None or not self._accept(claim, writer):
                return
            if self._executor is None:
                self._create_executor(claim)
            assert self._starting is not None
            await asyncio.shield(self._starting)
            if self._writer is writer:
                self._answer_claim(claim)
                await self._handle_requests(reader, writer)
        except ConnectionError:
            pass
        except Exception as error:  # noqa: BLE001 - a bug ends the process with a traceback
            self._end(error)
        finally:
            if self._writer is writer:
                self._on_disconnect()
            writer.close()

    async def _host_workers(
        self, request: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Run workers for the lead of a job on another node; none while this node's lease has ended."""
        if self._executor is not None and self._starting is not None and not self._is_fenced:
            await asyncio.shield(self._starting)
            await self._executor.workers.hosted.serve(str(request["workers"]), str(request["address"]), reader, writer)

    def _accept(self, claim: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        if claim["epoch"] <= self._epoch:
            log_event(_log, "claim_refused", level=logging.WARNING, epoch=claim["epoch"], current=self._epoch)
            writer.write(json_line({"report": "Refused", "epoch": self._epoch}))
            return False
        self._epoch = claim["epoch"]
        before, self._writer, self._is_claim_answered = self._writer, writer, False
        if before is not None:
            before.close()
            self._on_client_lost()
        return True

    def _create_executor(self, claim: dict[str, Any]) -> None:
        self._life = self._epoch
        self._options = ExecutorOptions(**claim["options"])
        self._devices = devices_from_json(claim["devices"])
        state = Path(claim["state"])
        if self._log_in_state:
            buffer_log(state / "executor.log")
        dependencies = ExecutorDependencies(clock=self._clock)
        self._executor = Executor(self._devices, state, self._options, self._report, dependencies)
        if self._outlives_clients:
            self._executor.suspend(suspended=True)
        self._starting = asyncio.create_task(self._start(self._executor))

    async def _start(self, executor: Executor) -> None:
        await executor.start(self._forkserver)
        stopping = asyncio.create_task(executor.stopped.wait())
        stopping.add_done_callback(lambda task: None if task.cancelled() else self._end(0))
        executor.broken.add_done_callback(lambda broken: self._end(broken.result()))
        ticking = asyncio.create_task(self._tick(executor))
        ticking.add_done_callback(lambda task: None if task.cancelled() else self._end(task.exception()))
        self._tasks = [stopping, ticking]

    def _answer_claim(self, claim: dict[str, Any]) -> None:
        """Send the inventory to a new client, and then all reports that it has not stored."""
        assert self._executor is not None
        if claim["life"] == self._life:
            self._outbox.acknowledge(claim["after"])
        inventory = Inventory(os.getpid(), self._life, tuple(self._devices), self._executor.jobs.statuses())
        self._lease = Lease(claim.get("lease_s", 0.0), boot_clock())
        self._executor.limit(self._lease.ends)
        if self._is_fenced:  # trainings continue when the client orders it
            self._is_fenced = False
            self._executor.freeze(frozen=False)
        self._beat_s = claim.get("beat_s", 0.0)  # an older version would not understand heartbeats
        is_first, jobs = self._epoch == self._life, len(inventory.jobs)
        log_event(_log, "claimed", epoch=self._epoch, first=is_first, jobs=jobs, unsent_reports=len(self._outbox))
        self._send({"report": "Claimed", "beat_s": self._beat_s, **asdict(inventory)})
        self._is_claim_answered = True
        for numbered in self._outbox:
            self._send_report(numbered)

    def _on_disconnect(self) -> None:
        self._writer, self._is_claim_answered = None, False
        self._on_client_lost()
        if not self._outlives_clients:
            self._end(0)

    def _on_client_lost(self) -> None:
        self._alone_since = self._clock()
        if not self._outlives_clients or self._executor is None:
            return
        is_announced = self._expects_client or self._executor.is_stopping
        level = logging.INFO if is_announced else logging.WARNING
        log_event(_log, "client_left" if is_announced else "client_lost", level=level, epoch=self._epoch)
        if not self._expects_client:
            self._executor.suspend(suspended=True)

    @property
    def _outlives_clients(self) -> bool:
        return self._executor is not None and self._options.on_orphan == "wait"

    async def _handle_requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        executor = self._executor
        assert executor is not None
        while (value := await _next(reader)) is not None and self._writer is writer:
            match value["do"]:
                case "introduce":
                    program = Program.from_json(value["program"])
                    executor.add_job(JobId(value["job"]), program, resume=value["resume"])
                    if self._log_in_state:
                        flush_log()  # the state folder exists now
                case "check":
                    self._background(self._check_entries(executor, value))
                case "carry":
                    executor.workers.introduce_peers([peer_from_json(each) for each in value.get("peers", ())])
                    executor.apply_orders([order_from_json(order) for order in value["orders"]])
                case "forget":
                    executor.remove_job(JobId(value["job"]))
                case "hand_over":
                    executor.hand_over(JobId(value["job"]))
                case "acknowledge":
                    self._outbox.acknowledge(value["number"])
                case "lease":
                    self._lease.renew(value["beat"])
                    executor.limit(self._lease.ends)
                case "proceed":
                    self._expects_client = False
                    executor.suspend(suspended=False)
                case "leave":
                    self._expects_client = True
                case "stop":
                    log_event(_log, "stop", checkpoint=value["checkpoint"])
                    executor.stop(checkpoint=value["checkpoint"])

    def _background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        task.add_done_callback(lambda task: None if task.cancelled() else self._end_if_failed(task.exception()))
        self._tasks.append(task)

    async def _check_entries(self, executor: Executor, request: dict[str, Any]) -> None:
        programs = {job: Program.from_json(program) for job, program in request["programs"].items()}
        errors = await executor.checks.run(programs, request["timeout_s"])
        if programs:
            log_event(_log, "entries_checked", checked=len(errors), failed=sum(map(bool, errors.values())))
        self._send({"report": "Checked", "errors": errors})
        for job, checked in executor.checks.fine.items():  # policies order jobs by length before these have run
            self._report(Sized(JobId(job), checked.total_steps, checked.batch_size, checked.num_samples))

    def _end_if_failed(self, error: BaseException | None) -> None:
        if error is not None:
            self._end(error)

    def _report(self, report: Report) -> None:
        numbered = self._outbox.put(report)
        if self._is_claim_answered:
            self._send_report(numbered)
            if not self._outlives_clients:  # there will be no other client to repeat it for
                self._outbox.acknowledge(numbered.number)

    def _send_report(self, numbered: NumberedReport) -> None:
        self._send({"number": numbered.number, **report_to_json(numbered.report)})

    def _send(self, value: dict[str, Any]) -> None:
        if self._writer is not None:
            with contextlib.suppress(ConnectionError, RuntimeError):
                self._writer.write(json_line(value))

    async def _tick(self, executor: Executor) -> None:
        while True:
            await asyncio.sleep(self._options.tick_s)
            self._check_lease(executor)
            executor.tick()
            self._send_heartbeat()
            alone_s = 0.0 if self._writer is not None else self._clock() - self._alone_since
            if self._expects_client and alone_s > self._options.handover_s:
                self._expects_client = False
                executor.suspend(suspended=True)
            if self._outlives_clients and alone_s > self._max_alone_s(executor):
                self.retire()

    def _check_lease(self, executor: Executor) -> None:
        """Suspend the jobs once the lease has expired; continue if it is renewed before this machine is given up."""
        is_expired = self._lease.is_expired(boot_clock())
        if is_expired != self._is_fenced:
            self._is_fenced = is_expired
            log_event(_log, "lease_expired" if is_expired else "lease_renewed", level=logging.WARNING)
            executor.freeze(frozen=is_expired)
            executor.suspend(suspended=is_expired)

    def _send_heartbeat(self) -> None:
        """Send a heartbeat from the event loop, since that is what may hang."""
        if self._is_claim_answered and self._beat_s and self._clock() - self._beat_at >= self._beat_s:
            self._beat_at = self._clock()
            self._send({"report": "Alive", "beat": self._lease.beat(boot_clock())})

    def _max_alone_s(self, executor: Executor) -> float:
        """How long to wait for a client; shorter if there is nothing to hand over."""
        options = self._options
        has_work = len(self._outbox) or not executor.jobs.is_over
        return options.orphan_s if has_work else min(options.orphan_s, options.handover_s)

    def retire(self) -> None:
        """Save the states of all jobs and exit."""
        if self._executor is None or self._starting is None or not self._starting.done():
            self._end(0)
        else:
            log_event(_log, "retiring")
            self._alone_since = self._clock()  # so that this happens once
            self._executor.stop(checkpoint=True)

    def exit(self) -> None:
        """Exit at once with all processes: the parent has died."""
        self._end(0)

    def _exit_if_unclaimed(self) -> None:
        if self._executor is None:
            self._end(0)

    def _end(self, result: int | str | BaseException | None) -> None:
        """Exit with a code, an error for the user, or an exception, which is a bug."""
        if self._exit.done():
            return
        if isinstance(result, BaseException):
            self._exit.set_exception(result)
        elif isinstance(result, str):
            print(f"carpool: {result}", file=sys.stderr)  # noqa: T201 - there is no client to report it to
            self._exit.set_result(1)
        else:
            self._exit.set_result(result or 0)

    async def _close_writer(self) -> None:
        writer = self._writer  # the client may disconnect while this waits
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


def buffer_log(path: Path) -> None:
    """Log to a file from `flush_log` on, and keep the lines until then: a run that fails to start leaves no file."""
    logger = logging.getLogger("carpool")
    file = logging.FileHandler(path, encoding="utf-8", delay=True)
    file.setFormatter(logger.handlers[0].formatter)
    logger.handlers[:] = [
        logging.handlers.MemoryHandler(1 << 20, flushLevel=logging.CRITICAL + 1, target=file, flushOnClose=False)
    ]


def flush_log() -> None:
    """Write the buffered lines, and the following ones directly."""
    logger = logging.getLogger("carpool")
    for handler in logger.handlers:
        if isinstance(handler, logging.handlers.MemoryHandler) and handler.target is not None:
            handler.flush()
            logger.handlers[:] = [handler.target]


async def serve_client(end: socket.socket, forkserver: Launched) -> int:
    """Serve one client until its connection is closed. Returns the exit code."""
    server = ExecutorServer(log_in_state=True, forkserver=forkserver)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, server.exit)
    server.on_connection(*await asyncio.open_connection(sock=end, limit=MAX_LINE_BYTES))
    return await server.run()


async def serve_clients(listener: socket.socket, forkserver: Launched) -> int:
    """Serve one client after another. Returns the exit code."""
    server = ExecutorServer(forkserver=forkserver)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, server.retire)
    accepting = await asyncio.start_unix_server(server.on_connection, sock=listener, limit=MAX_LINE_BYTES)
    try:
        return await server.run()
    finally:
        accepting.close()


def serve(fd: int, parent: int | None, forkserver: Launched) -> int:
    """Serve a parent over a socket, or without one all clients that connect to it. Returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    set_process_name("carpool-exec")
    configure_logging()
    use_pci_bus_order()
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))  # every job has a log and mirrors
    end = socket.socket(fileno=fd)
    os.set_inheritable(fd, False)
    if parent is None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the starter's terminal may be closed
        return asyncio.run(serve_clients(end, forkserver))
    exit_with_parent(parent, signal.SIGTERM)
    return asyncio.run(serve_client(end, forkserver))
