"""Runs a daemon loop during a test."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from carpool.service.daemon.read_model import ReadModel
from carpool.service.store.store import Store


@asynccontextmanager
async def at_work(premises: ReadModel, store: Store) -> AsyncIterator[None]:
    """Run a loop; afterwards close the event feed and the store."""
    running = asyncio.create_task(premises.loop.run())
    try:
        yield
    finally:
        premises.events.feed.close()
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        store.close()
