"""Executor client: starts, finds or claims an executor process, sends orders and receives reports."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from carpool.core.errors import CarpoolError
from carpool.core.messages import Order
from carpool.core.model import JobId
from carpool.jobs.devices import LocalDevice
from carpool.jobs.program import Program
from carpool.runtime.compat.process_lifetime import ProcessHandle
from carpool.runtime.executor.client_protocol import (
    ExecutorOptions,
    Inventory,
    checked_report_from_json,
    inventory_from_json,
    json_line,
    order_to_json,
)
from carpool.runtime.executor.reports import Gone, Receipts, Report
from carpool.runtime.process.launch import EXECUTOR, Launched, launch_executor
from carpool.runtime.remote.remote_worker_stream import Peer, peer_to_json

__all__ = ["Claim", "ClaimRefused", "ExecutorClient", "ExecutorOptions"]

_SOCKET = "executor"
_LOG = "executor.log"
_PID = "executor.pid"
_JOB = "job"

_MAX_LINE_BYTES = 1 << 26
_START_S = 180.0  # importing torch from a cold disk is slow
_STOP_S = 20.0  # for a stop without checkpoints
_BEATS = 8  # heartbeats requested within the time after which silence means a hang
_LEASE_BEAT_S = 0.5  # longest interval of heartbeats that renew a lease: jobs stop soon after the last one
_TIMEOUTS = 2  # reads within that time: a client that was itself stopped then still finds what has arrived meanwhile


class ExecutorSocket:
    """A private folder with the socket, the log and the pid of an executor that outlives its clients."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def is_answered(self) -> bool:
        end = self.connect()
        if end is not None:
            end.close()
        return end is not None

    def connect(self) -> socket.socket | None:
        """A connection to the executor; None if there is none."""
        end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with self._short_path() as path:
                end.connect(path)
        except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError):
            end.close()
            return None
        except BaseException:
            end.close()
            raise
        return end

    def start_executor(self, environment: Mapping[str, str]) -> tuple[socket.socket, subprocess.Popen[bytes]]:
        """Start an executor in its own session, listening here; a connection to it.

        It and all its jobs get this environment.
        """
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder.chmod(0o700)
        (self._folder / _SOCKET).unlink(missing_ok=True)
        log = os.open(self._folder / _LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
                with self._short_path() as path:
                    listener.bind(path)
                (self._folder / _SOCKET).chmod(0o600)
                listener.listen()  # before the executor runs, so that the connection below succeeds
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", EXECUTOR, str(listener.fileno())],
                    pass_fds=[listener.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=dict(environment),
                    start_new_session=True,
                )
        finally:
            os.close(log)
        with contextlib.suppress(OSError):  # on a full disk; the pid is only needed to kill an executor that hangs
            (self._folder / _PID).write_text(str(process.pid), encoding="ascii")
        end = self.connect()
        assert end is not None, "the socket listens since before the executor was started"
        return end, process

    def remove(self) -> None:
        """Remove the socket and the pid file of an executor that has exited; its log stays."""
        for name in (_SOCKET, _PID):
            (self._folder / name).unlink(missing_ok=True)

    async def kill_executor(self) -> None:
        """Kill an executor that does not answer: two must not run the same jobs."""
        if (pid := self.executor_pid) is not None:
            hung = ProcessHandle(pid)
            hung.kill()
            await hung.wait()

    @property
    def executor_pid(self) -> int | None:
        """The process of the executor that was started last, if it is alive."""
        try:
            pid = int((self._folder / _PID).read_text(encoding="ascii"))
            return pid if EXECUTOR.encode() in Path(f"/proc/{pid}/cmdline").read_bytes() else None
        except (OSError, ValueError):
            return None

    @property
    def job_marker(self) -> Path:
        """The file that names the job which the executor is handling."""
        return self._folder / _JOB

    @property
    def log_tail(self) -> str:
        with contextlib.suppress(OSError):
            return (self._folder / _LOG).read_text(encoding="utf-8", errors="replace").strip()[-300:]
        return ""

    @contextlib.contextmanager
    def _short_path(self) -> Iterator[str]:
        """A path of the socket shorter than 108 bytes, however deep the folder is."""
        handle = os.open(self._folder, os.O_PATH | os.O_DIRECTORY)
        try:
            yield f"/proc/self/fd/{handle}/{_SOCKET}"
        finally:
            os.close(handle)


class ClaimRefused(CarpoolError):
    """The executor was claimed in a later epoch."""

    def __init__(self, epoch: int) -> None:
        super().__init__(f"another client has claimed the executor in epoch {epoch}")
        self.epoch = epoch


@dataclass(frozen=True, slots=True)
class Claim:
    """A client's claim on an executor, with its configuration in case it is new."""

    devices: Sequence[LocalDevice]
    state: Path  # folder of its jobs' folders
    options: ExecutorOptions
    epoch: int = 1
    life: int = 0  # of the executor that the client knows
    after: int = 0  # number of its last report that the client has stored
    silence_s: float = 0.0  # without a heartbeat, after which the executor is killed; 0: never
    lease_s: float = 0.0  # without an answer to a heartbeat, after which the executor suspends its jobs; 0: never

    def as_json(self) -> dict[str, Any]:
        return {
            "do": "claim",
            "epoch": self.epoch,
            "life": self.life,
            "after": self.after,
            "beat_s": min(self.silence_s / _BEATS, _LEASE_BEAT_S) if self.lease_s else self.silence_s / _BEATS,
            "lease_s": self.lease_s,
            "devices": [asdict(device) for device in self.devices],
            "state": str(self.state),
            "options": asdict(self.options),
        }


class ExecutorProcess(Protocol):
    """The process of an executor, as its client sees it; `ProcessHandle` for one on this machine."""

    pid: int

    async def wait(self, kill_after_s: float | None = None) -> None: ...

    def kill(self) -> None: ...

    def detach(self) -> None: ...

    def close(self) -> None: ...

    @property
    def exit_reason(self) -> str: ...


class RemoteProcess:
    """The process of an executor on another machine: known by its connection alone."""

    def __init__(self, pid: int = 0) -> None:
        self.pid = pid
        self.closed = asyncio.Event()

    async def wait(self, kill_after_s: float | None = None) -> None:
        """Return when the connection is closed; a process there cannot be killed from here, its lease ends it."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.closed.wait(), kill_after_s)

    def kill(self) -> None:
        self.closed.set()

    def detach(self) -> None:
        self.closed.set()

    def close(self) -> None:
        self.closed.set()

    @property
    def exit_reason(self) -> str:
        return "the connection was closed"


class ExecutorClient:
    """Connection to an executor process."""

    inventory: Inventory  # at the time of the claim
    _process: ExecutorProcess

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._gone: Gone | None = None
        self._is_receiving = False
        self._silence_s = 0.0
        self._receipts = Receipts()
        self.answered_at = time.monotonic()  # when the last heartbeat was answered

    @classmethod
    async def start(
        cls,
        devices: Sequence[LocalDevice],
        state: Path,
        *,
        options: ExecutorOptions | None = None,
        launched: Launched | None = None,
        wait: bool = True,
    ) -> ExecutorClient:
        """Start an executor that exits with this process, or claim one that was launched for it.

        Its jobs' folders and its log are under ``state``. Returns once it can launch workers; without ``wait`` earlier,
        while torch is imported.
        """
        options = options or ExecutorOptions()
        process, end = launched or launch_executor(options.environment)
        client = await cls.claim(end, Claim(devices, state, options), process)
        if wait:
            try:
                await client.check({}, 0.0)
            except BaseException:
                client.kill()
                await client._wait_for_exit()
                raise
        return client

    @classmethod
    async def claim(
        cls, end: socket.socket, claim: Claim, process: subprocess.Popen[bytes] | None = None
    ) -> ExecutorClient:
        """Claim the executor at the other end of a socket; ``process`` if this process has started it.

        `ClaimRefused` if another client has claimed it in a later epoch.
        """
        client = cls(*await asyncio.open_connection(sock=end, limit=_MAX_LINE_BYTES))
        if process is not None:
            client._process = ProcessHandle(process.pid, process)
        await client._claim(claim, process)
        if process is None:
            client._process = ProcessHandle(client.inventory.pid)
        return client

    @classmethod
    async def claim_remote(
        cls,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        claim: Claim,
        process: ExecutorProcess,
        before: ExecutorClient | None = None,
    ) -> ExecutorClient:
        """Claim the executor of another machine; `before` is the broken connection that this one continues."""
        client = cls(reader, writer)
        client._process = process
        await client._claim(claim, None)
        if before is not None and before.life == client.life:
            client._receipts = before._receipts
        return client

    async def _claim(self, claim: Claim, process: subprocess.Popen[bytes] | None) -> None:
        self._send(claim.as_json())
        answer = await self._first_answer(process)
        if answer["report"] == "Refused":
            self._writer.close()
            raise ClaimRefused(answer["epoch"])
        self.inventory = inventory_from_json(answer)
        self._silence_s = claim.silence_s if answer.get("beat_s") else 0.0  # an older version sends no heartbeats
        self._receipts = Receipts(claim.after if claim.life == self.inventory.life else 0)

    async def _first_answer(self, process: subprocess.Popen[bytes] | None) -> dict[str, Any]:
        answer = None
        try:
            with contextlib.suppress(TimeoutError):
                answer = await asyncio.wait_for(self._next(), _START_S)
        except asyncio.CancelledError:
            self._writer.close()
            if process is not None:
                process.kill()  # with its fork server; it has no jobs yet
                process.wait()
            raise
        if answer is None:
            reason = await self._wait_for_exit() if process is not None else "it closed the connection"
            self._writer.close()
            raise CarpoolError(f"the executor did not start: {reason}. Its output is on stderr.")
        return answer

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def life(self) -> int:
        """Identity of the executor: another one numbers its reports from 1."""
        return self.inventory.life

    @property
    def heard(self) -> int:
        """Number of the last report that `receive` returned."""
        return self._receipts.last

    def introduce(self, job: JobId, program: Program, *, resume: bool = False) -> None:
        """Add a job before its first order; with ``resume`` it continues from its folder."""
        self._send({"do": "introduce", "job": job, "program": program.as_json(), "resume": resume})

    def carry(self, orders: Sequence[Order], peers: Sequence[Peer] = ()) -> None:
        """Send orders, with the peers that run workers for those across several machines."""
        request = {"do": "carry", "orders": [order_to_json(order) for order in orders]}
        self._send({**request, "peers": [peer_to_json(each) for each in peers]} if peers else request)

    def forget(self, job: JobId) -> None:
        self._send({"do": "forget", "job": job})

    def hand_over(self, job: JobId) -> None:
        """Stop a job with its state on disk and drop it; `HandedOver` follows."""
        self._send({"do": "hand_over", "job": job})

    def acknowledge(self, number: int) -> None:
        """Confirm that all reports up to a number are stored."""
        self._send({"do": "acknowledge", "number": number})

    def proceed(self) -> None:
        """Resume jobs that were suspended while the executor had no client."""
        self._send({"do": "proceed"})

    async def check(self, programs: Mapping[JobId, Program], timeout_s: float) -> dict[JobId, str]:
        """Wait until workers can be launched, and call entries. Returns an error by job, empty if there is none.

        Jobs whose entries could not be checked in time are left out. Call it before the first `receive`.
        """
        sent = {job: program.as_json() for job, program in programs.items()}
        self._send({"do": "check", "programs": sent, "timeout_s": timeout_s})
        while (value := await self._next()) is not None:
            if value["report"] == "Checked":
                return {JobId(job): error for job, error in value["errors"].items()}
        raise CarpoolError(f"the executor did not start: {await self._wait_for_exit()}. Its output is on stderr.")

    async def receive(self) -> Report:
        """The next report; `Gone`, on every call, once the executor has exited."""
        self._is_receiving = True
        while self._gone is None:
            try:
                value = await self._next_in_time()
            except TimeoutError:
                self.kill()
                await self._wait_for_exit()
                self._gone = Gone(f"it sent no heartbeat for {self._silence_s:g} s and was killed")
                break
            if value is None:
                self._gone = Gone(await self._wait_for_exit())
            elif "beat" in value:
                self._send({"do": "lease", "beat": value["beat"]})
                self.answered_at = time.monotonic()  # only now: the executor's lease must end before ours
            elif "number" in value and self._receipts.is_new(value.pop("number")):
                return checked_report_from_json(value)
        return self._gone

    async def stop(self, *, checkpoint: bool) -> None:
        """Stop all jobs at a step boundary, with a checkpoint if asked for, and end the executor.

        The caller should continue to `receive` meanwhile, or the last reports are lost.
        """
        self._send({"do": "stop", "checkpoint": checkpoint})
        await self._process.wait(None if checkpoint else _STOP_S)
        if not self._is_receiving:
            self._writer.close()

    async def leave(self) -> None:
        """Disconnect and announce that another client will claim the executor."""
        self._send({"do": "leave"})
        with contextlib.suppress(ConnectionError):
            await self._writer.drain()
        self._writer.close()
        self._process.detach()

    def kill(self) -> None:
        """Kill the executor and all its processes; `receive` then returns `Gone`."""
        self._process.kill()

    def _send(self, value: Mapping[str, Any]) -> None:
        if self._writer.is_closing():  # `receive` notices the end; an encrypted transport raises anything
            return
        with contextlib.suppress(ConnectionError, RuntimeError):
            self._writer.write(json_line(value))

    async def _next_in_time(self) -> dict[str, Any] | None:
        if not self._silence_s:
            return await self._next()
        for _ in range(_TIMEOUTS):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._silence_s / _TIMEOUTS):
                    return await self._next()
        raise TimeoutError

    async def _next(self) -> dict[str, Any] | None:
        try:
            received = await self._reader.readline()
        except (ConnectionError, ValueError):
            return None
        if not received.endswith(b"\n"):
            return None
        value: dict[str, Any] = json.loads(received)
        return value

    async def _wait_for_exit(self) -> str:
        self._writer.close()
        if isinstance(self._process, RemoteProcess):
            self._process.close()
        await self._process.wait(_STOP_S)
        return self._process.exit_reason
