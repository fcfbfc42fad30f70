"""Page event stream: which panels changed, sent at most a few times a second."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator

from carpool.service.auth import Principal
from carpool.service.service import SchedulerService

_MIN_INTERVAL_S = 0.4  # between two messages
_HEARTBEAT_S = 15.0  # keeps proxies from closing an idle stream
_MAX_JOBS = 50  # named in a message; with more, a page refreshes everything


async def page_events(
    service: SchedulerService, principal: Principal, *, min_interval_s: float = _MIN_INTERVAL_S
) -> AsyncGenerator[bytes, None]:
    """Server-sent events: ``{"kinds": […], "jobs": […]}``, or ``"jobs": null`` for too many to name.

    Events are merged into at most one message per `min_interval_s`; at most one waits for a slow client.
    """
    kinds: set[str] = set()
    jobs: set[str] = set()
    changed = asyncio.Event()

    async def listen() -> None:
        async for event in service.events(principal):
            kinds.add(event.kind)
            if event.job and len(jobs) <= _MAX_JOBS:
                jobs.add(event.job)
            changed.set()

    listening = asyncio.create_task(listen())
    try:
        yield b"retry: 2000\n\n"
        while not listening.done() or changed.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(_either(changed, listening), _HEARTBEAT_S)
            if not changed.is_set():
                yield b": heartbeat\n\n"
                continue
            changed.clear()
            message = {"kinds": sorted(kinds), "jobs": sorted(jobs) if len(jobs) <= _MAX_JOBS else None}
            kinds.clear()
            jobs.clear()
            yield f"data: {json.dumps(message)}\n\n".encode()
            await asyncio.sleep(min_interval_s)
    finally:
        listening.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await listening


async def _either(changed: asyncio.Event, listening: asyncio.Task[None]) -> None:
    waiting = asyncio.create_task(changed.wait())
    try:
        await asyncio.wait({waiting, listening}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
