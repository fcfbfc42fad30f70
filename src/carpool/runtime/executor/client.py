"""Executor client: starts, finds or claims an executor process, sends orders and receives reports."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from carpool.core.errors import CarpoolError
from carpool.core.messages import Order
from carpool.core.model import JobId
from carpool.jobs.devices import LocalDevice
from carpool.jobs.program import Program
from carpool.runtime.compat.process_lifetime import ProcessHandle
from carpool.runtime.executor.client_protocol import (
    ExecutorOptions,
    Inventory,
    inventory_from_json,
    json_line,
    order_to_json,
    report_from_json,
)
from carpool.runtime.executor.reports import Gone, Receipts, Report

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
                    [sys.executable, "-P", "-m", "carpool.runtime.executor.server", str(listener.fileno())],
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
            hung = ProcessHandle(pid)
            hung.kill()
            await hung.wait()

    @property
    def resident(self) -> int | None:
        """The process of the executor that was started last, if it is one that lives."""
        try:
            pid = int((self._folder / _PID).read_text(encoding="ascii"))
            return pid if b"carpool.runtime.executor.server" in Path(f"/proc/{pid}/cmdline").read_bytes() else None
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


__all__ = ["Claim", "ClaimRefused", "ExecutorClient", "ExecutorOptions"]

_MAX_LINE_BYTES = 1 << 26
_START_S = 180.0  # importing torch from a cold disk takes its time
_STOP_S = 20.0  # for a stop without checkpoints, which is quick
_BEATS = 8  # signs of life that are asked for within the time after which silence means a hang
_LOOKS = 2  # within that time: one who was stopped finds at the second look what came meanwhile


class ClaimRefused(CarpoolError):
    """The executor was claimed in a later epoch than this."""

    def __init__(self, epoch: int) -> None:
        super().__init__(f"the executor was claimed in epoch {epoch}")
        self.epoch = epoch


@dataclass(frozen=True, slots=True)
class Claim:
    """Who claims an executor, what was heard of it before, and what it is to be if it is new."""

    devices: Sequence[LocalDevice]
    state: Path  # its jobs' folders are made in there
    options: ExecutorOptions
    epoch: int = 1
    life: int = 0  # of the executor that was heard before
    after: int = 0  # number of its last report that is kept
    silence_s: float = 0.0  # without a sign of life, after which it is taken for hung and ended; 0: never


class ExecutorClient:
    """An executor in a process of its own."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._gone: Gone | None = None
        self._has_listener = False  # somebody has begun to receive
        self._silence_s = 0.0
        self._receipts = Receipts()

    inventory: Inventory  # how it stood when it was claimed
    _process: ProcessHandle

    @classmethod
    async def start(
        cls, devices: Sequence[LocalDevice], state: Path, *, options: ExecutorOptions | None = None
    ) -> ExecutorClient:
        """Start one for these devices, which ends with this process; its jobs' folders are made under ``state``."""
        options = options or ExecutorOptions()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            process = subprocess.Popen(  # noqa: ASYNC220 - exec takes a millisecond
                [sys.executable, "-P", "-m", "carpool.runtime.executor.server", str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **options.environment},
                process_group=0,  # Ctrl-C in the terminal is for whoever started it
            )
        return await cls.claim(ours, Claim(devices, state, options), process)

    @classmethod
    async def claim(
        cls, end: socket.socket, claim: Claim, process: subprocess.Popen[bytes] | None = None
    ) -> ExecutorClient:
        """Claim the executor at the other end of a socket: one's own, or one that another process has started.

        `ClaimRefused` where a later epoch was there before.
        """
        link = cls(*await asyncio.open_connection(sock=end, limit=_MAX_LINE_BYTES))
        if process is not None:
            link._process = ProcessHandle(process.pid, process)
        devices = [asdict(device) for device in claim.devices]
        begin = {"devices": devices, "state": str(claim.state), "options": asdict(claim.options)}
        beat_s = claim.silence_s / _BEATS
        known = {"epoch": claim.epoch, "life": claim.life, "after": claim.after, "beat_s": beat_s}
        link._say({"do": "claim", **known, **begin})
        try:
            first = await asyncio.wait_for(link._next(), _START_S)
        except TimeoutError:
            first = None
        except asyncio.CancelledError:
            link._writer.close()  # nobody wants it any more; it ends with the line
            if process is not None:
                process.kill()  # and at once, with its fork server: it has no jobs yet
                process.wait()
            raise
        if first is None:
            reason = await link._bury() if process is not None else "it closed the line"
            link._writer.close()
            raise CarpoolError(f"the executor did not start: {reason}. What it said stands on stderr.")
        if first["report"] == "Refused":
            link._writer.close()
            raise ClaimRefused(first["epoch"])
        link.inventory = inventory_from_json(first)
        link._silence_s = claim.silence_s if first.get("beat_s") else 0.0  # an older one knows of no beats
        if process is None:
            link._process = ProcessHandle(link.inventory.pid)
        link._receipts = Receipts(claim.after if claim.life == link.inventory.life else 0)
        return link

    @property
    def pid(self) -> int:
        """The executor's process."""
        return self._process.pid

    @property
    def life(self) -> int:
        """Which executor it is: another one numbers its reports anew."""
        return self.inventory.life

    @property
    def heard(self) -> int:
        """The number of the report that `receive` returned last."""
        return self._receipts.last

    def introduce(self, job: JobId, program: Program, *, resume: bool = False) -> None:
        """Make a job known before its first order; with ``resume`` it goes on from what its folder holds."""
        self._say({"do": "introduce", "job": job, "program": program.as_json(), "resume": resume})

    def carry(self, orders: Sequence[Order]) -> None:
        """Pass orders on."""
        self._say({"do": "carry", "orders": [order_to_json(order) for order in orders]})

    def forget(self, job: JobId) -> None:
        """A job is over and will not be asked for again."""
        self._say({"do": "forget", "job": job})

    def acknowledge(self, number: int) -> None:
        """What came up to this report is kept; it need not be said again."""
        self._say({"do": "acknowledge", "number": number})

    def proceed(self) -> None:
        """Let jobs go on that stood still because nobody was here."""
        self._say({"do": "proceed"})

    async def receive(self) -> Report:
        """The next report; `Gone`, again and again, once there is no executor any more."""
        self._has_listener = True
        while self._gone is None:
            try:
                value = await self._heard()
            except TimeoutError:
                self.kill()
                await self._bury()
                self._gone = Gone(f"nothing was heard of it for {self._silence_s:g} s; it was killed")
                break
            if value is None:
                self._gone = Gone(await self._bury())
            elif "number" in value and self._receipts.is_new(value.pop("number")):
                return report_from_json(value)
        return self._gone

    async def stop(self, *, checkpoint: bool) -> None:
        """Halt all jobs at a step boundary, keep their state if asked to, and end the executor.

        Somebody should go on receiving meanwhile, or the last reports are lost.
        """
        self._say({"do": "stop", "checkpoint": checkpoint})
        await self._process.wait(None if checkpoint else _STOP_S)
        if not self._has_listener:
            self._writer.close()  # else by whoever hears of its end

    async def leave(self) -> None:
        """Let the executor go on, for whoever claims it next."""
        self._say({"do": "leave"})
        with contextlib.suppress(ConnectionError):
            await self._writer.drain()
        self._writer.close()
        self._process.detach()

    def kill(self) -> None:
        """End the executor, and with it all it started, in the middle of whatever they do; `receive` says `Gone`."""
        self._process.kill()

    def _say(self, value: Mapping[str, Any]) -> None:
        with contextlib.suppress(ConnectionError, RuntimeError):  # its end is seen by `receive`
            self._writer.write(json_line(value))

    async def _heard(self) -> dict[str, Any] | None:
        """What comes next; TimeoutError where that takes longer than one that works can be silent."""
        if not self._silence_s:
            return await self._next()
        for _ in range(_LOOKS):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._silence_s / _LOOKS):
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

    async def _bury(self) -> str:
        self._writer.close()
        await self._process.wait(_STOP_S)
        return self._process.exit_reason
