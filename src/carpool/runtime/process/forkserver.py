"""Fork server: a process with torch imported that forks workers in milliseconds.

It is started by fork and exec, not by a plain fork of the executor: so it does not inherit the executor's descriptors,
threads and event loop, and the executor itself does not import torch. It has a single thread and never initializes
CUDA, which makes forking it safe. Every worker leads its own session and dies with the fork server, which dies with the
executor and kills what workers have started. It is launched before the executor imports its own modules.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import sys
import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from carpool.core.errors import CarpoolError
from carpool.runtime.compat.allocator import hide_huge_pages
from carpool.runtime.compat.process_lifetime import exit_with_parent, set_process_name, wait_for_exit
from carpool.runtime.process.channel import AsyncChannel, Channel, Closed, close_all, close_all_but
from carpool.runtime.process.launch import ONE_THREAD, Launched, launch_forkserver
from carpool.runtime.process.protocol import (
    Alive,
    CheckEntry,
    EntryChecked,
    Exited,
    Fork,
    Forked,
    RunProgram,
    SendSignal,
    WorkerFailed,
)

_START_S = 120.0  # importing torch from a cold disk is slow
_STOP_S = 10.0
NO_TORCH = "torch is not installed here, which trainings need: pip install 'carpool[torch]'"


class ForkServerDied(CarpoolError):
    """The fork server has exited, and all its workers with it."""


class ForkServer:
    """The executor's handle on its fork server.

    ``on_exit`` is called for every worker that has exited, ``on_death`` if the fork server itself exits unexpectedly.
    """

    def __init__(
        self,
        on_exit: Callable[[Exited], object],
        on_death: Callable[[str], object] = lambda reason: None,
    ) -> None:
        self._on_exit = on_exit
        self._on_death = on_death
        self._forks: deque[asyncio.Future[int]] = deque()
        self._stopping = False
        self._listener: asyncio.Task[None] | None = None  # once it can fork

    async def start(self, launched: Launched | None = None) -> None:
        """Wait until it can fork; without one that was launched earlier, launch it."""
        self._process, end = launched or launch_forkserver()
        self._channel = AsyncChannel(end)
        try:
            await asyncio.wait_for(self._channel.receive(), _START_S)
        except (Closed, TimeoutError) as error:
            await self.stop()
            raise ForkServerDied(
                f"the fork server did not start: {error}. Its output is on the executor's stderr."
            ) from error
        except asyncio.CancelledError:
            await self.stop()
            raise
        self._listener = asyncio.create_task(self._listen())

    @property
    def pid(self) -> int:
        return self._process.pid

    async def fork(self, channel: socket.socket, log: int | None = None) -> int:
        """Fork a worker on this end of a channel, which may be closed here afterwards. Returns its pid."""
        if self._stopping or self._listener is None or self._listener.done():
            raise ForkServerDied("the fork server has exited")
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._forks.append(answer)
        self._channel.send(Fork(), [channel.fileno()] if log is None else [channel.fileno(), log])
        return await answer

    def kill(self, pid: int, signum: signal.Signals = signal.SIGKILL) -> None:
        """Send a worker a signal; ignored if it has exited."""
        self._channel.send(SendSignal(pid, int(signum)))

    async def stop(self) -> None:
        """Stop it and all its workers; returns when they have exited."""
        self._stopping = True
        self._channel.close()
        if self._listener is None:
            self._process.kill()  # it is still importing torch, and has no workers
        try:
            await asyncio.wait_for(wait_for_exit(self._process), _STOP_S)
        except TimeoutError:
            self._process.kill()
        self._process.wait()
        if self._listener is not None:
            await self._listener

    async def _listen(self) -> None:
        try:
            while True:
                match (await self._channel.receive()).message:
                    case Forked(pid, error):
                        _settle(self._forks.popleft(), pid, error)
                        await asyncio.sleep(0)  # so that the caller learns of the worker before its exit
                    case Exited() as exited:
                        self._on_exit(exited)
        except Closed as error:
            for answer in self._forks:
                if not answer.done():
                    answer.set_exception(ForkServerDied(f"the fork server has exited: {error}"))
            if not self._stopping:
                self._on_death(str(error))


def _settle(answer: asyncio.Future[int], pid: int, error: str) -> None:
    if answer.cancelled():
        return
    if error:
        answer.set_exception(CarpoolError(f"forking a worker failed: {error}"))
    else:
        answer.set_result(pid)


class _Server:
    """Forks and reaps workers; exits with the executor."""

    def __init__(self, channel: Channel, inbox: int, *, has_torch: bool) -> None:
        self._channel = channel
        self._inbox = inbox
        self._has_torch = has_torch
        self._workers: dict[int, int] = {}  # handle to pid
        self._poll = select.poll()
        self._poll.register(inbox, select.POLLIN)

    def serve(self) -> None:
        try:
            while True:
                for ready, _ in self._poll.poll():
                    if ready == self._inbox:
                        self._receive()
                    else:
                        self._reap(ready)
        except Closed:
            pass
        finally:
            for handle, pid in self._workers.items():
                _kill_session(pid)
                os.waitpid(pid, 0)
                os.close(handle)

    def _receive(self) -> None:
        while self._channel.poll():
            received = self._channel.receive()
            assert received is not None
            match received.message:
                case Fork():
                    self._fork(received.fds)
                case SendSignal(pid, signum):
                    if pid in self._workers.values():
                        os.kill(pid, signum)

    def _fork(self, fds: tuple[int, ...]) -> None:
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # until the child has its own handler
        try:
            pid = os.fork()
            if not pid:
                os._exit(self._become_worker(parent, fds))
        except OSError as error:
            self._channel.send(Forked(0, error.strerror or str(error)))
            return
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
            close_all(fds)
        handle = os.pidfd_open(pid)
        self._workers[handle] = pid
        self._poll.register(handle, select.POLLIN)
        self._channel.send(Forked(pid))

    def _reap(self, handle: int) -> None:
        pid = self._workers.pop(handle)
        self._poll.unregister(handle)
        os.close(handle)
        _kill_session(pid)  # before its pid can be reused
        _, status = os.waitpid(pid, 0)
        self._channel.send(Exited(pid, os.waitstatus_to_exitcode(status)))

    def _become_worker(self, parent: int, fds: tuple[int, ...]) -> int:
        """In the child: drop the fork server's resources and run the worker."""
        try:
            exit_with_parent(parent)
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
            if len(fds) > 1:
                os.dup2(fds[1], 1)
                os.dup2(fds[1], 2)
            self._channel.close()  # and detaches it from the socket object, which must not close a reused descriptor
            close_all_but(fds[0])
            channel = Channel(socket.socket(fileno=fds[0]))
            if not self._has_torch:
                return _refuse(channel)
            from carpool.runtime.process.worker_main import main as work

            return work(channel)
        except BaseException:  # noqa: BLE001 - nothing may reach the fork server's own frames
            traceback.print_exc()
            return 1
        finally:
            sys.stdout.flush()
            sys.stderr.flush()


def _kill_session(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)  # it may not lead its session yet


def _refuse(channel: Channel) -> int:
    """In a worker of a machine without torch: commands get a plain start, trainings an error."""
    with contextlib.suppress(Closed):
        received = channel.receive()
        assert received is not None
        match received.message:
            case RunProgram():
                channel.send(Forked(0, NO_TORCH))
            case CheckEntry():
                channel.send(EntryChecked(NO_TORCH))
            case _:
                channel.send(WorkerFailed("input", NO_TORCH))
        channel.receive()  # until the executor ends it
    return 0


def _import_torch() -> bool:
    """Import what workers need, without computing (which would start threads) or initializing CUDA."""
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        return False
    importlib.import_module("carpool.runtime.process.worker_main")
    # The first optimizer that a process builds imports some 800 modules of torch.
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    return True


def _warm_up() -> bool:
    """Prepare to fork workers. Returns whether torch is installed for them."""
    gc.disable()  # of all that the imports allocate hardly anything is garbage, and collections would walk it again
    has_torch = _import_torch()
    gc.enable()
    threads = len(list(Path("/proc/self/task").iterdir()))
    assert threads == 1, f"the fork server has {threads} threads and must not fork"
    for name in ONE_THREAD:
        del os.environ[name]
    hide_huge_pages(os.environ)
    return has_torch


def main() -> NoReturn:
    """``python -m carpool.runtime.process.forkserver FD PARENT``: serve the executor at the other end of FD."""
    exit_with_parent(int(sys.argv[2]), signal.SIGTERM)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    set_process_name("carpool-forksrv")
    end = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(end.fileno(), False)
    channel = Channel(end)
    has_torch = _warm_up()  # until then SIGTERM ends it at once: there are no workers to kill
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    gc.freeze()  # workers share these pages; a collection would write to all of them
    with contextlib.suppress(Closed):  # the executor may have exited already; the server sees that too
        channel.send(Alive())
    try:
        _Server(channel, end.fileno(), has_torch=has_torch).serve()
    except Exception:  # noqa: BLE001 - printed before exiting
        traceback.print_exc()
        os._exit(1)
    finally:
        os._exit(0)  # unloading torch takes seconds


if __name__ == "__main__":
    main()
