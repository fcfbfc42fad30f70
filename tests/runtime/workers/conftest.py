"""Real workers from a real fork server, with the test as their executor."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest

from carpool.jobs.program import Program
from carpool.runtime.process.channel import AsyncChannel, Closed, close_all, pair
from carpool.runtime.process.forkserver import ForkServer
from carpool.runtime.process.protocol import (
    Alive,
    Apply,
    Begin,
    Contributed,
    Done,
    Evaluated,
    Exited,
    Gather,
    Halted,
    Message,
    MetricsMeasured,
    Proceed,
    Ready,
    Stepped,
    Updated,
    WorkerFailed,
)
from carpool.runtime.process.shared_memory import new_memory_file
from carpool.runtime.reduce.shm_layout import Owners, ShmLayout

HERE = Path(__file__).parent
TIMEOUT_S = 60.0  # far more than any test needs
T = TypeVar("T")
M = TypeVar("M", bound=Message)


@dataclass(eq=False)
class WorkerEnd:
    """A worker, as its executor sees it."""

    pid: int
    channel: AsyncChannel
    ready: Ready | None = None
    others: list[Message] = field(default_factory=list)  # heard while waiting for something else

    def send(self, message: Message, *fds: int) -> None:
        self.channel.send(message, fds)

    async def receive(self, kind: type[M]) -> M:
        """The next message of a type; earlier ones are kept aside."""
        while True:
            message = (await self.channel.receive()).message
            if isinstance(message, kind):
                return message
            assert not isinstance(message, WorkerFailed), message
            if not isinstance(message, Alive | Stepped):
                self.others.append(message)

    async def ended(self) -> None:
        """Wait until the channel is closed at the other end."""
        try:
            while True:
                await self.channel.receive()
        except Closed:
            pass


class Bench:
    """A fork server, and the workers that a test has forked from it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.exits: dict[int, asyncio.Future[int]] = {}
        self.forkserver = ForkServer(self._on_exit)
        self.forked: list[WorkerEnd] = []  # of the present test
        self._epochs = 0

    def _on_exit(self, exited: Exited) -> None:
        self.exits[exited.pid].set_result(exited.code)

    async def fork(self) -> WorkerEnd:
        ours, theirs = pair()
        with theirs:
            pid = await self.forkserver.fork(theirs)
        self.exits[pid] = asyncio.get_running_loop().create_future()
        worker = WorkerEnd(pid, AsyncChannel(ours))
        self.forked.append(worker)
        return worker

    async def begun(self, program: Program, *counter: int, **options: Any) -> WorkerEnd:
        """A worker that has received Begin, perhaps with a step counter."""
        worker = await self.fork()
        log = os.open(self.folder / f"log-{worker.pid}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        worker.send(Begin("job", asdict(program), "cpu", **options), log, *counter)
        os.close(log)
        return worker

    async def worker(self, program: Program, *counter: int, **options: Any) -> WorkerEnd:
        """A worker that is ready."""
        worker = await self.begun(program, *counter, **options)
        worker.ready = await worker.receive(Ready)
        return worker

    async def workers(self, count: int, program: Program, **options: Any) -> list[WorkerEnd]:
        workers = [await self.worker(program, **options) for _ in range(count)]
        assert len({worker.ready.fingerprint for worker in workers if worker.ready}) == 1
        return workers

    def start_epoch(self, workers: Sequence[WorkerEnd], owners: Owners = (), **options: Any) -> int:
        """Start an epoch; its number."""
        self._epochs += 1
        fds = []
        if len(workers) > 1:
            assert workers[0].ready is not None
            pieces = owners or tuple((rank, rank + 1) for rank in range(len(workers)))
            slots = ShmLayout(pieces, workers[0].ready.contribution_bytes)
            fds = [new_memory_file("test", 0 if options.get("reducer") == "group" else slots.num_bytes)]
        for rank, worker in enumerate(workers):
            worker.send(Proceed(self._epochs, rank, len(workers), owners, **options), *fds)
        close_all(fds)
        return self._epochs

    async def drive(self, workers: Sequence[WorkerEnd], epoch: int, *, until: int | None = None) -> list[Message]:
        """Run an epoch to a step or to its end; the last messages of its ranks."""
        while True:
            said = [await self.answer(worker, workers) for worker in workers]
            if all(isinstance(each, Halted | Done) for each in said):
                return said
            steps = {each.step for each in said if isinstance(each, Contributed | Updated)}
            assert len(steps) == 1, f"members are apart: {said}"
            (step,) = steps
            is_updated = isinstance(said[0], Updated)
            for worker in workers:
                worker.send(
                    Gather(epoch, step) if is_updated else Apply(epoch, step, halt=until == step + 1),
                )

    async def answer(self, worker: WorkerEnd, workers: Sequence[WorkerEnd]) -> Message:
        """A worker's next message about a step; evaluations are forwarded."""
        while True:
            message = (await worker.channel.receive()).message
            assert not isinstance(message, WorkerFailed), message
            if isinstance(message, Evaluated):
                for other in workers:
                    if other is not worker:
                        other.send(MetricsMeasured(message.step, message.metrics))
            if isinstance(message, Contributed | Updated | Halted | Done):
                return message

    async def dismiss(self) -> None:
        """End all workers of a test by closing their channels, and wait for their ends."""
        for worker in self.forked:
            worker.channel.close()
        codes = [await self.exits[worker.pid] for worker in self.forked]
        assert all(isinstance(code, int) for code in codes)
        self.forked.clear()


Run = Callable[[Coroutine[Any, Any, T]], T]


@pytest.fixture(scope="session")
def runner() -> Iterator[asyncio.Runner]:
    """One loop for all tests, since the fork server lives in it."""
    with asyncio.Runner() as loop:
        yield loop


@pytest.fixture(scope="session")
def shared_bench(runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    bench = Bench(tmp_path_factory.mktemp("logs"))
    runner.run(bench.forkserver.start())
    yield bench
    runner.run(bench.forkserver.stop())


@pytest.fixture
def bench(shared_bench: Bench, runner: asyncio.Runner) -> Iterator[Bench]:
    yield shared_bench
    runner.run(shared_bench.dismiss())


@pytest.fixture
def run(runner: asyncio.Runner) -> Run[Any]:
    """Run a test's coroutine with a timeout."""

    def with_timeout(work: Coroutine[Any, Any, T]) -> T:
        async def limited() -> T:
            async with asyncio.timeout(TIMEOUT_S):
                return await work

        return runner.run(limited())

    return with_timeout


@pytest.fixture
def program() -> Callable[..., Program]:
    """A program of one of the entries in jobs.py."""

    def make(name: str = "mlp", *, options: dict[str, Any] | None = None, **args: Any) -> Program:
        return Program(entry=f"jobs.py:{name}", args=args, folder=str(HERE), **options or {})

    return make
