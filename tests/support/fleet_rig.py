"""Agents as processes on loopback, links that can be cut, and a daemon over them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from carpool.jobs.hosts_file import Host, HostsFile
from carpool.runtime.executor.client import ExecutorOptions, ExecutorSocket
from carpool.service.daemon.bootstrap import DaemonInstance, DaemonOptions
from carpool.service.fleet.remote_access import remote_members

TOKEN = "0123456789abcdef0123456789abcdef"
PATIENCE_S = 180.0
OPTIONS = ExecutorOptions(mirror_s=0.2, grace_s=0.5, tick_s=0.02)


@dataclass(slots=True)
class AgentProcess:
    """A `carpool agent` on loopback; started again it listens on the same port."""

    folder: Path
    name: str
    devices: str = "cpu:1"
    extra: Sequence[str] = ()
    port: int = 0
    process: subprocess.Popen[str] | None = field(default=None)

    @property
    def state(self) -> Path:
        return self.folder / self.name

    @property
    def executor_pid(self) -> int | None:
        return ExecutorSocket(self.state / "executor").executor_pid

    def start(self) -> None:
        token = self.folder / "fleet.token"
        if not token.exists():
            token.touch(mode=0o600)
            token.write_text(TOKEN, encoding="ascii")
        command = [sys.executable, "-c", "from carpool.cli.main import main; main()", "agent"]
        where = ["--listen", f"127.0.0.1:{self.port}", "--token-file", str(token), "--state", str(self.state)]
        self.process = subprocess.Popen(
            [*command, *where, "--devices", self.devices, *self.extra], stderr=subprocess.PIPE, text=True
        )
        assert self.process.stderr is not None
        line = self.process.stderr.readline()
        assert "listening" in line, line
        self.port = int(line.partition("127.0.0.1:")[2].split()[0])

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """Kill agent and executor, as a power loss would."""
        if (pid := self.executor_pid) is not None:
            os.kill(pid, signal.SIGKILL)
        self.close()

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None
        if (pid := self.executor_pid) is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def log_of(self, job: str) -> bytes:
        path = self.state / "jobs" / job / "log"
        return path.read_bytes() if path.is_file() else b""


class Link:
    """A TCP proxy that stops forwarding while it is cut, without closing anything."""

    def __init__(self, port: int) -> None:
        self.port = 0
        self._to = port
        self._whole = asyncio.Event()
        self._whole.set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> Link:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    def cut(self) -> None:
        self._whole.clear()

    def drop(self) -> None:
        """Close all connections."""
        for task in self._tasks:
            task.cancel()

    def heal(self) -> None:
        self._whole.set()

    async def close(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._whole.wait()
        with suppress(ConnectionError):
            there = await asyncio.open_connection("127.0.0.1", self._to)
            for source, target in ((reader, there[1]), (there[0], writer)):
                task = asyncio.create_task(self._forward(source, target))
                self._tasks.add(task)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(ConnectionError):
                while chunk := await reader.read(1 << 16):
                    await self._whole.wait()
                    writer.write(chunk)
                    await writer.drain()
        finally:
            writer.close()


def hosts_of(*agents: AgentProcess, lease_s: float = 30.0, ports: dict[str, int] | None = None) -> HostsFile:
    ports = ports or {}
    hosts = [Host(each.name, "127.0.0.1", ports.get(each.name, each.port), TOKEN, tls=False) for each in agents]
    return HostsFile(tuple(hosts), lease_s)


class ShiftedClock:
    """The monotonic clock with time that has not passed: leases end when a test says so."""

    def __init__(self) -> None:
        self._ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self._ahead_s

    def advance(self, seconds: float) -> None:
        self._ahead_s += seconds


@asynccontextmanager
async def fleet_daemon(
    state: Path, hosts: HostsFile, policy: str = "fifo", *, leave_running: bool = False, **options: Any
) -> AsyncIterator[DaemonInstance]:
    """A daemon over the machines of a hosts file, which is stopped in the end; `options` of `remote_members`."""
    members = await remote_members(hosts, state, **options)
    daemon = DaemonInstance.open(DaemonOptions(state, (), "1", policy, "fifo", options=OPTIONS, members=members))
    try:
        await daemon.start()
        running = asyncio.create_task(daemon.run())
        try:
            yield daemon
        finally:
            daemon.stop(leave_running=leave_running)
            await running
    finally:
        daemon.close()


async def until(daemon: DaemonInstance, holds: Callable[[], bool]) -> None:
    """Follow the feed until something holds."""
    async with asyncio.timeout(PATIENCE_S):
        async for _ in daemon.observers.events.feed.listen(0):
            if holds():
                return
