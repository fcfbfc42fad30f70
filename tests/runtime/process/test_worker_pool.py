"""A fork server that dies is taken down before another one takes its place."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Container

import pytest

from carpool.runtime.process.forkserver import ForkServer, ForkServerDied
from carpool.runtime.process.protocol import Exited, Message, Prewarm
from carpool.runtime.process.worker_pool import WorkerKey, WorkerPool


class Deaf:
    """Ears for a staff without workers."""

    def heard(self, who: WorkerKey, message: Message) -> None:
        raise AssertionError(who, message)

    def ended(self, who: WorkerKey, why: str) -> None:
        raise AssertionError(who, why)


class FakeForkServer(ForkServer):
    """Notes what is done to it; dies when it is told to."""

    def __init__(self, made: list[FakeForkServer], on_gone: Callable[[str], object], *, is_stillborn: bool) -> None:
        self.die = on_gone
        self.is_stillborn = is_stillborn  # it dies before it can fork
        self.done: list[str] = []
        self.made = made
        made.append(self)

    async def start(self) -> None:
        self.done.append("start")
        if self.is_stillborn:
            raise ForkServerDied("killed by SIGKILL")

    async def fork(self, channel: socket.socket, log: int | None = None) -> int:
        self.done.append("fork")
        return 4711

    async def stop(self) -> None:
        assert len(self.made) == 1 or self is self.made[-1], "the next one came before this one had gone"
        self.done.append("stop")


class Ward:
    """Makes fork_servers, one after another."""

    def __init__(self, stillborn: Container[int] = ()) -> None:
        self.made: list[FakeForkServer] = []
        self.stillborn = stillborn

    def make(self, on_exit: Callable[[Exited], object], on_gone: Callable[[str], object]) -> FakeForkServer:
        return FakeForkServer(self.made, on_gone, is_stillborn=len(self.made) + 1 in self.stillborn)


def test_a_dead_nursery_is_stopped_and_replaced() -> None:
    """Else its socket stays open, and it stays in the process table until the collector finds its handle."""
    ward = Ward()

    async def go() -> None:
        workers = WorkerPool(Deaf(), lambda: 0.0, ward.make)
        await workers.start()
        ward.made[0].die("killed by SIGKILL")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert [forkserver.done for forkserver in ward.made] == [["start", "stop"], ["start"]]
        await workers.stop()
        assert [forkserver.done for forkserver in ward.made] == [["start", "stop"], ["start", "stop"]]

    asyncio.run(go())


def test_a_process_that_is_asked_for_before_there_is_a_nursery_waits_for_it() -> None:
    """Else it is never forked, and whoever asked for it waits for ever."""
    ward = Ward()

    async def go() -> None:
        workers = WorkerPool(Deaf(), lambda: 0.0, ward.make)
        workers.seat(("", 1), Prewarm("cpu"))
        await asyncio.sleep(0)
        await workers.start()
        for _ in range(3):
            await asyncio.sleep(0)
        assert ward.made[0].done == ["start", "fork"]
        await workers.stop()

    asyncio.run(go())


@pytest.mark.parametrize(("stillborn", "made", "is_broken"), [({2, 3}, 4, False), (range(2, 99), 6, True)])
def test_a_nursery_that_dies_while_it_starts_is_replaced_too_but_not_for_ever(
    stillborn: Container[int], made: int, is_broken: bool
) -> None:
    ward = Ward(stillborn)

    async def go() -> None:
        workers = WorkerPool(Deaf(), lambda: 0.0, ward.make)
        await workers.start()
        ward.made[0].die("killed by SIGKILL")
        for _ in range(20):
            await asyncio.sleep(0)
        assert (len(ward.made), workers.broken.done()) == (made, is_broken)
        await workers.stop()

    asyncio.run(go())
