"""Borrowed workers: the lead's side of workers that other machines run for its jobs.

It has the interface of the worker pool where the executor needs it. Descriptors do not cross machines: the content of a
memory file is sent instead, and comes back when a worker has written one.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

from carpool.core.errors import CarpoolError, InputError
from carpool.core.model import JobId
from carpool.jobs.code_archive import absolute_paths
from carpool.jobs.devices import LentDevice
from carpool.jobs.hosts_file import Host
from carpool.jobs.program import Program
from carpool.runtime.process.channel import decode, encode
from carpool.runtime.process.protocol import Load, Message, Publish, WorkerFailed
from carpool.runtime.process.worker_pool import WorkerKey
from carpool.runtime.remote.lending import Frame, Lender, LendingStream
from carpool.runtime.remote.remote_files import code_of
from carpool.runtime.remote.remote_link import Connection, HostUnreachable, RemoteFiles, connect
from carpool.runtime.sharing.mps_admission import PendingWorker

_RETRY_S = 0.5
_REACH_S = 120.0  # a lender that the scheduler counts as present and this machine cannot reach fails the job
_COPY_BYTES = 1 << 24


class BorrowListener(Protocol):
    """Receives what happens to borrowed workers."""

    def on_message(self, key: WorkerKey, message: Message) -> None: ...

    def on_exit(self, key: WorkerKey, why: str) -> None: ...

    def on_lender_lost(self, key: WorkerKey, why: str) -> None:
        """Called instead of `on_exit` when the connection to a worker's machine is lost."""

    def on_output(self, job: JobId, output: bytes) -> None:
        """Called with what workers on other machines write to their log."""


@dataclass(slots=True, eq=False)
class _Loan:
    """The workers of one job on one machine, and the connection to it."""

    job: JobId
    lender: Lender
    stream: LendingStream = field(default_factory=LendingStream)
    workers: set[int] = field(default_factory=set)
    mirrors: dict[int, int] = field(default_factory=dict)  # worker to the memory file that it is to write
    address: str = ""  # of this machine, as the lender reaches it
    task: asyncio.Task[None] | None = None


class BorrowedWorkers:
    """All workers that other machines run for this executor's jobs."""

    def __init__(
        self,
        listener: BorrowListener,
        state: Path,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._listener = listener
        self._state = state
        self._clock = clock
        self._lenders: dict[str, Lender] = {}
        self._loans: dict[tuple[JobId, str], _Loan] = {}
        self._is_closing = False
        self.devices: dict[int, LentDevice] = {}

    def introduce(self, lender: Lender) -> None:
        """Learn how a machine is reached and which devices it has."""
        self._lenders[lender.host.name] = lender
        self.devices = {number: each for number, each in self.devices.items() if each.host != lender.host.name}
        self.devices.update(lender.lent_devices)

    def owns(self, key: WorkerKey) -> bool:
        return self._find(key) is not None

    def start(self, worker: PendingWorker, program: Program) -> None:
        """Have a worker started on its device's machine, which is connected to as long as it takes."""
        job, number = JobId(worker.key[0]), worker.key[1]
        lender = self._lenders[self.devices[worker.device].host]
        loan = self._loans.get((job, lender.host.name))
        if loan is None:
            loan = self._loans[job, lender.host.name] = _Loan(job, lender)
            loan.task = asyncio.create_task(self._run(loan, program))
        loan.workers.add(number)
        values = {"device": worker.device, "lane": worker.lane, "threads": worker.threads}
        loan.stream.send(do="start", worker=number, program=asdict(program), **values)

    def send(self, key: WorkerKey, message: Message, fds: tuple[int, ...] = ()) -> None:
        """Send a message, with the content of its memory file; ignored if the worker has exited."""
        loan = self._find(key)
        if loan is None:
            return
        values: Frame = {"do": "send", "worker": key[1], "line": encode(message).decode()}
        if isinstance(message, Publish):
            self._forget_mirror(loan, key[1])
            loan.mirrors[key[1]] = os.dup(fds[0])
            loan.stream.send(**values)
        elif isinstance(message, Load) and message.path:
            self._send_checkpoint(loan, message.path, values)
        elif isinstance(message, Load) and fds:
            loan.stream.send_memory(fds[0], **values)
        else:
            loan.stream.send(**values)

    def _send_checkpoint(self, loan: _Loan, path: str, values: Frame) -> None:
        """Send a checkpoint with the message to load it; without it the worker reports that it is unusable."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            loan.stream.send(**values)
            return
        loan.stream.send_memory(fd, **values)
        os.close(fd)

    def kill(self, key: WorkerKey) -> None:
        """Kill a worker; its exit is reported as any other."""
        loan = self._find(key)
        if loan is not None and loan.address:
            loan.stream.send(do="kill", worker=key[1])
        elif loan is not None:  # not connected: nothing runs there
            asyncio.get_running_loop().call_soon(self._on_exit, loan, key[1], "it had not been started")

    def own_address(self, job: JobId) -> str:
        """This machine's address as the first machine that lends workers to a job reaches it."""
        return next((loan.address for loan in self._loans.values() if loan.job == job and loan.address), "")

    async def close(self) -> None:
        """Cut all connections, which ends the workers."""
        self._is_closing = True
        tasks = [loan.task for loan in self._loans.values() if loan.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _find(self, key: WorkerKey) -> _Loan | None:
        return next((loan for loan in self._loans.values() if loan.job == key[0] and key[1] in loan.workers), None)

    async def _run(self, loan: _Loan, program: Program) -> None:
        name, is_given_up = loan.lender.host.name, False
        try:
            reader, writer, _ = await self._reach(loan, program)
            loan.address = writer.get_extra_info("sockname")[0]
            async for frame, memory in loan.stream.run(reader, writer):
                self._on_frame(loan, frame, memory)
                if not loan.workers:
                    return
        except (CarpoolError, OSError) as error:
            is_given_up = True
            reason = f"a worker cannot be started on {name}: {error}"
            for worker in sorted(loan.workers):
                self._listener.on_message((loan.job, worker), WorkerFailed("input", reason))
        finally:
            self._end(loan, "" if is_given_up else f"the connection to {name} was lost")

    async def _reach(self, loan: _Loan, program: Program) -> Connection:
        """Connect to a lender and bring the job's code there; InputError if it can never work."""
        host, give_up_at = loan.lender.host, self._clock() + _REACH_S
        while True:
            try:
                await self._bring_code(host, loan.job, program)
                connection = await connect(host, "lend", job=loan.job)
                if connection.facts.is_running:
                    return connection
                connection.writer.close()
                problem: Exception = HostUnreachable("has no executor", where=f"host {host.name!r}")
            except (HostUnreachable, OSError) as error:
                problem = error
            if self._clock() > give_up_at:
                raise problem
            await asyncio.sleep(_RETRY_S)

    async def _bring_code(self, host: Host, job: JobId, program: Program) -> None:
        """Send the job's code unless the lender has it; InputError for a path that it lacks."""
        files, code = RemoteFiles(host, purpose="code"), code_of(self._state, job)
        try:
            paths = absolute_paths([*program.args.values(), *program.environment.values()])
            if missing := await files.missing_paths(paths) if paths else []:
                raise InputError(
                    f"job {job!r} names {missing[0]}, which does not exist there",
                    way_out="Copy or mount it at the same path, or keep it in the job's folder.",
                )
            if code is not None:
                await files.put_code(code.digest, await asyncio.to_thread(code.archive.read_bytes))
                await files.unpack(job, code.digest, code.links)
        finally:
            files.close()

    def _on_frame(self, loan: _Loan, frame: Frame, memory: int | None) -> None:
        try:
            worker = int(frame.get("worker", 0))
            if memory is not None and worker in loan.mirrors:
                _copy_file(memory, loan.mirrors[worker])
                self._forget_mirror(loan, worker)
        finally:
            if memory is not None:
                os.close(memory)
        if "output" in frame:
            self._listener.on_output(loan.job, str(frame["output"]).encode("latin-1"))
        elif worker in loan.workers and "line" in frame:
            self._listener.on_message((loan.job, worker), decode(str(frame["line"]).encode()))
        elif worker in loan.workers and "exit" in frame:
            self._on_exit(loan, worker, str(frame["exit"]))

    def _on_exit(self, loan: _Loan, worker: int, why: str) -> None:
        if worker not in loan.workers:
            return
        loan.workers.discard(worker)
        self._forget_mirror(loan, worker)
        self._listener.on_exit((loan.job, worker), why)
        if not loan.workers and not loan.address and loan.task is not None:
            loan.task.cancel()  # it is still trying to connect, for nobody

    def _end(self, loan: _Loan, lost: str) -> None:
        if self._loans.get((loan.job, loan.lender.host.name)) is loan:
            del self._loans[loan.job, loan.lender.host.name]
        workers, loan.workers = sorted(loan.workers), set()
        for worker in list(loan.mirrors):
            self._forget_mirror(loan, worker)
        for worker in () if self._is_closing else workers:
            if lost:
                self._listener.on_lender_lost((loan.job, worker), lost)
            else:
                self._listener.on_exit((loan.job, worker), "it had not been started")

    def _forget_mirror(self, loan: _Loan, worker: int) -> None:
        fd = loan.mirrors.pop(worker, None)
        if fd is not None:
            os.close(fd)


def _copy_file(source: int, target: int) -> None:
    """Replace the content of a memory file."""
    size, at = os.fstat(source).st_size, 0
    os.ftruncate(target, size)
    while at < size:
        at += os.pwrite(target, os.pread(source, _COPY_BYTES, at), at)
