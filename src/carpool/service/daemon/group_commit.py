"""Group commit: makes the pending records of a store durable, in groups; on a full disk jobs are refused, not lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
from collections.abc import Awaitable, Callable

from carpool.core.errors import CarpoolError
from carpool.logs import log_event
from carpool.service.store.disk_space import DiskReserve
from carpool.service.store.store import Store, StoreFull

_log = logging.getLogger(__name__)

Commit = Callable[[Callable[[], None]], Awaitable[None]]


async def commit_inline(commit: Callable[[], None]) -> None:
    """Run a commit in the event loop: quicker than in a thread where no client waits for an answer."""
    commit()


class CommitFailed(CarpoolError):
    """The journal could not be written, so the request was not accepted."""


class ReadOnly(CarpoolError):
    """The disk is full: no jobs are accepted."""


class GroupCommit:
    """Commits a store whenever requested; all requests made during one commit are in the next.

    Before each commit `prepare` is called; what it returns is called once the commit is durable.
    """

    def __init__(
        self,
        store: Store,
        prepare: Callable[[], Callable[[], None]],
        tell_operator: Callable[[str], None],
        stopping: asyncio.Event,
        *,
        commit: Commit = asyncio.to_thread,
        reserve: DiskReserve | None = None,
        retry_s: float = 2.0,
    ) -> None:
        self._store = store
        self._prepare = prepare
        self._tell_operator = tell_operator
        self._stopping = stopping  # ends the wait for room on a full disk
        self.commit = commit
        self._reserve = reserve
        self._retry_s = retry_s
        self._requested = asyncio.Event()
        self._durable: asyncio.Future[None] | None = None  # of the next commit
        self._committing: asyncio.Future[None] | None = None  # the commit in progress
        self._is_closing = False
        self.disk_full = ""  # why no jobs are accepted; empty: they are

    def request(self) -> asyncio.Future[None]:
        """Request a commit; the future resolves when everything that the store has been given so far is durable."""
        self._requested.set()
        if self._durable is None:
            self._durable = asyncio.get_running_loop().create_future()
            self._durable.add_done_callback(_retrieve_exception)
        return self._durable

    async def flush(self) -> None:
        """Return when everything requested so far is durable."""
        pending = (self._committing, self._durable)
        await asyncio.gather(*[asyncio.shield(each) for each in pending if each is not None])

    async def run(self) -> None:
        """Commit whenever it is requested, until `close` or a commit that failed."""
        while not self._is_closing:
            if self.disk_full:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._requested.wait(), self._retry_s)
                self._check_room()
            else:
                await self._requested.wait()
            if self._requested.is_set():
                await self.commit_once()

    async def close(self, running: asyncio.Task[None]) -> None:
        """End `run` after the commit under way, and commit what is left; raises the error of a commit that failed."""
        self._is_closing = True
        self._requested.set()
        await running
        self._is_closing = False
        if self._requested.is_set():
            await self.commit_once()

    async def commit_once(self) -> None:
        self._requested.clear()
        durable, self._durable = self._durable, None
        self._committing = durable
        finish = self._prepare()
        try:
            await self._make_durable()
            finish()
        except Exception as error:
            for waiting in (durable, self.request()):  # no caller may wait forever
                if waiting is not None and not waiting.done():
                    waiting.set_exception(error)
            raise
        if durable is not None and not durable.done():
            durable.set_result(None)

    async def _make_durable(self) -> None:
        """Commit; on a full disk release the reserve, and retry until it succeeds."""
        while True:
            try:
                await self.commit(self._store.commit)
            except StoreFull as error:
                self._on_disk_full(str(error))
                if self._reserve is not None and self._reserve.release():
                    continue
                if self._is_closing or self._stopping.is_set():
                    raise CommitFailed(f"{error}. Free disk space, then start again.") from error
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), self._retry_s)
            except (OSError, sqlite3.Error) as error:
                log_event(_log, "commit_failed", level=logging.ERROR, error=str(error))
                raise CommitFailed(f"the journal cannot be written: {error}. Start again.") from error
            else:
                self._check_room()
                return

    def hold_reserve(self) -> None:
        """Allocate the reserve; without room for it no jobs are accepted."""
        if self._reserve is not None and not self._reserve.hold():
            self._on_disk_full(f"the disk of {self._store.folder} is full")

    def _on_disk_full(self, reason: str) -> None:
        if not self.disk_full:
            log_event(_log, "disk_full", level=logging.ERROR, reason=reason)
            self._tell_operator(f"{reason}. No jobs are accepted until there is room; running jobs continue.")
        self.disk_full = reason

    def _check_room(self) -> None:
        """Accept jobs again once there is room, and the reserve is restored."""
        if self.disk_full and (self._reserve is None or self._reserve.hold()):
            self.disk_full = ""
            log_event(_log, "disk_has_room", level=logging.WARNING)
            self._tell_operator("the disk has room again; jobs are accepted again")


def _retrieve_exception(durable: asyncio.Future[None]) -> None:
    """Suppress asyncio's warning if no caller is waiting; `run` itself raises the error."""
    if not durable.cancelled():
        durable.exception()
