"""A fork server that dies is stopped and replaced."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Container

import pytest

from carpool.runtime.process.forkserver import ForkServer, ForkServerDied
from carpool.runtime.process.launch import Launched
from carpool.runtime.process.protocol import Exited, Message, Prewarm
from carpool.runtime.process.worker_pool import WorkerKey, WorkerPool


class NoListener:
    """Listener of a pool without workers."""

    def on_message(self, key: WorkerKey, message: Message) -> None:
        raise AssertionError(key, message)

    def on_exit(self, key: WorkerKey, why: str) -> None:
        raise AssertionError(key, why)


class FakeForkServer(ForkServer):
    """Records its calls; dies on request."""

    def __init__(self, made: list[FakeForkServer], on_death: Callable[[str], object], *, fails_to_start: bool) -> None:
        self.die = on_death
        self.fails_to_start = fails_to_start
        self.done: list[str] = []
        self.made = made
        made.append(self)

    async def start(self, launched: Launched | None = None) -> None:
        self.done.append("start")
        if self.fails_to_start:
            raise ForkServerDied("killed by SIGKILL")

    async def fork(self, channel: socket.socket, log: int | None = None) -> int:
        self.done.append("fork")
        return 4711

    async def stop(self) -> None:
        assert len(self.made) == 1 or self is self.made[-1], "replaced before it was stopped"
        self.done.append("stop")


class ForkServers:
    """Makes fake fork servers."""

    def __init__(self, failing: Container[int] = ()) -> None:
        self.made: list[FakeForkServer] = []
        self.failing = failing

    def make(self, on_exit: Callable[[Exited], object], on_death: Callable[[str], object]) -> FakeForkServer:
        return FakeForkServer(self.made, on_death, fails_to_start=len(self.made) + 1 in self.failing)


def test_a_dead_fork_server_is_stopped_and_replaced() -> None:
    """Otherwise its socket and its process table entry stay."""
    servers = ForkServers()

    async def go() -> None:
        workers = WorkerPool(NoListener(), lambda: 0.0, servers.make)
        await workers.start()
        servers.made[0].die("killed by SIGKILL")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert [forkserver.done for forkserver in servers.made] == [["start", "stop"], ["start"]]
        await workers.stop()
        assert [forkserver.done for forkserver in servers.made] == [["start", "stop"], ["start", "stop"]]

    asyncio.run(go())


def test_a_process_requested_before_the_start_waits_for_the_fork_server() -> None:
    servers = ForkServers()

    async def go() -> None:
        workers = WorkerPool(NoListener(), lambda: 0.0, servers.make)
        workers.prewarm(("", 1), Prewarm("cpu"))
        await asyncio.sleep(0)
        await workers.start()
        for _ in range(3):
            await asyncio.sleep(0)
        assert servers.made[0].done == ["start", "fork"]
        await workers.stop()

    asyncio.run(go())


def test_a_process_that_is_killed_before_it_was_forked_has_exited() -> None:
    """A stop does not wait until torch is imported."""
    servers = ForkServers()

    class Listener(NoListener):
        def __init__(self) -> None:
            self.exited: asyncio.Queue[WorkerKey] = asyncio.Queue()

        def on_exit(self, key: WorkerKey, why: str) -> None:
            self.exited.put_nowait(key)

    async def go() -> None:
        listener = Listener()
        workers = WorkerPool(listener, lambda: 0.0, servers.make)
        workers.prewarm(("", 1), Prewarm("cpu"))
        await asyncio.sleep(0)
        workers.kill(("", 1))
        assert await listener.exited.get() == ("", 1)
        assert servers.made == []
        await workers.stop()

    asyncio.run(go())


def test_a_first_fork_server_that_does_not_start_ends_the_executor() -> None:
    servers = ForkServers({1})

    async def go() -> None:
        workers = WorkerPool(NoListener(), lambda: 0.0, servers.make)
        workers.begin()
        assert "SIGKILL" in await workers.broken
        assert len(servers.made) == 1
        await workers.stop()

    asyncio.run(go())


@pytest.mark.parametrize(("failing", "made", "is_broken"), [({2, 3}, 4, False), (range(2, 99), 6, True)])
def test_fork_servers_that_fail_to_start_are_replaced_a_limited_number_of_times(
    failing: Container[int], made: int, is_broken: bool
) -> None:
    servers = ForkServers(failing)

    async def go() -> None:
        workers = WorkerPool(NoListener(), lambda: 0.0, servers.make)
        await workers.start()
        servers.made[0].die("killed by SIGKILL")
        for _ in range(20):
            await asyncio.sleep(0)
        assert (len(servers.made), workers.broken.done()) == (made, is_broken)
        await workers.stop()

    asyncio.run(go())
