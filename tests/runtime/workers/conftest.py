"""Real workers from a real forkserver, under the hand of a test that speaks the executor's side of the protocol."""

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
PATIENCE_S = 60.0  # a test that waits longer has failed; none comes near it
T = TypeVar("T")
M = TypeVar("M", bound=Message)


@dataclass(eq=False)
class Hand:
    """A worker, as its executor sees it."""

    pid: int
    channel: AsyncChannel
    ready: Ready | None = None
    others: list[Message] = field(default_factory=list)  # heard while waiting for something else

    def say(self, message: Message, *fds: int) -> None:
        self.channel.send(message, fds)

    async def hear(self, kind: type[M]) -> M:
        """The next message of a kind; what comes before it is put aside."""
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
        self.forkserver = ForkServer(self._buried)
        self.hands: list[Hand] = []  # of the present test
        self._formations = 0

    def _buried(self, exited: Exited) -> None:
        self.exits[exited.pid].set_result(exited.code)

    async def hand(self) -> Hand:
        ours, theirs = pair()
        with theirs:
            pid = await self.forkserver.fork(theirs)
        self.exits[pid] = asyncio.get_running_loop().create_future()
        hand = Hand(pid, AsyncChannel(ours))
        self.hands.append(hand)
        return hand

    async def begun(self, program: Program, **options: Any) -> Hand:
        """A worker that has been told what to do; it may be ready or broken next."""
        hand = await self.hand()
        log = os.open(self.folder / f"log-{hand.pid}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        hand.say(Begin("job", asdict(program), "cpu", **options), log)
        os.close(log)
        return hand

    async def worker(self, program: Program, **options: Any) -> Hand:
        """A worker that is ready."""
        hand = await self.begun(program, **options)
        hand.ready = await hand.hear(Ready)
        return hand

    async def workers(self, count: int, program: Program, **options: Any) -> list[Hand]:
        hands = [await self.worker(program, **options) for _ in range(count)]
        assert len({hand.ready.fingerprint for hand in hands if hand.ready}) == 1
        return hands

    def form(self, hands: Sequence[Hand], owners: Owners = (), **options: Any) -> int:
        """Put workers into a formation; its number."""
        self._formations += 1
        fds = []
        if len(hands) > 1:
            assert hands[0].ready is not None
            pieces = owners or tuple((rank, rank + 1) for rank in range(len(hands)))
            slots = ShmLayout(pieces, hands[0].ready.segment_bytes)
            fds = [new_memory_file("test", 0 if options.get("reducer") == "group" else slots.num_bytes)]
        for rank, hand in enumerate(hands):
            hand.say(Proceed(self._formations, rank, len(hands), owners, **options), *fds)
        close_all(fds)
        return self._formations

    async def drive(self, hands: Sequence[Hand], formation: int, *, until: int | None = None) -> list[Message]:
        """Carry a formation to a step, or to its end: what its members said last."""
        while True:
            said = [await self.answer(hand, hands) for hand in hands]
            if all(isinstance(each, Halted | Done) for each in said):
                return said
            steps = {each.step for each in said if isinstance(each, Contributed | Updated)}
            assert len(steps) == 1, f"members are apart: {said}"
            (step,) = steps
            is_updated = isinstance(said[0], Updated)
            for hand in hands:
                hand.say(
                    Gather(formation, step) if is_updated else Apply(formation, step, halt=until == step + 1),
                )

    async def answer(self, hand: Hand, hands: Sequence[Hand]) -> Message:
        """What a worker says about a step; evaluations are passed on."""
        while True:
            message = (await hand.channel.receive()).message
            assert not isinstance(message, WorkerFailed), message
            if isinstance(message, Evaluated):
                for other in hands:
                    if other is not hand:
                        other.say(MetricsMeasured(message.step, message.metrics))
            if isinstance(message, Contributed | Updated | Halted | Done):
                return message

    async def dismiss(self) -> None:
        """End all workers of a test by closing their channels, and wait for their ends."""
        for hand in self.hands:
            hand.channel.close()
        codes = [await self.exits[hand.pid] for hand in self.hands]
        assert all(isinstance(code, int) for code in codes)
        self.hands.clear()


Run = Callable[[Coroutine[Any, Any, T]], T]


@pytest.fixture(scope="session")
def runner() -> Iterator[asyncio.Runner]:
    """One loop for all tests, since the fork server lives in it."""
    with asyncio.Runner() as loop:
        yield loop


@pytest.fixture(scope="session")
def nursery_bench(runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    bench = Bench(tmp_path_factory.mktemp("logs"))
    runner.run(bench.forkserver.start())
    yield bench
    runner.run(bench.forkserver.stop())


@pytest.fixture
def bench(nursery_bench: Bench, runner: asyncio.Runner) -> Iterator[Bench]:
    yield nursery_bench
    runner.run(nursery_bench.dismiss())


@pytest.fixture
def run(runner: asyncio.Runner) -> Run[Any]:
    """Run a test's coroutine, but not for ever."""

    def within_patience(work: Coroutine[Any, Any, T]) -> T:
        async def limited() -> T:
            async with asyncio.timeout(PATIENCE_S):
                return await work

        return runner.run(limited())

    return within_patience


@pytest.fixture
def program() -> Callable[..., Program]:
    """A program of one of the entries in jobs.py."""

    def make(name: str = "mlp", *, options: dict[str, Any] | None = None, **args: Any) -> Program:
        return Program(entry=f"jobs.py:{name}", args=args, folder=str(HERE), **options or {})

    return make
