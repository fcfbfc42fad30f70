"""A daemon of pretended parts, at work for as long as somebody needs it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from carpool.service.daemon.read_model import ReadModel
from carpool.service.store.store import Store


@asynccontextmanager
async def at_work(premises: ReadModel, store: Store) -> AsyncIterator[None]:
    """Let a daemon run; in the end who listens is let go, and its store is closed."""
    running = asyncio.create_task(premises.loop.run())
    try:
        yield
    finally:
        premises.events.feed.close()
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        store.close()
