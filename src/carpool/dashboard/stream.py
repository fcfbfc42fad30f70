"""Page event stream: which panels changed, sent at most a few times a second."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator

from carpool.service.auth import Principal
from carpool.service.service import SchedulerService

_REST_S = 0.4  # between two messages
_HEARTBEAT_S = 15.0  # a comment, so that those in between do not take the silence for an end
_MOST_JOBS = 50  # named in a message; beyond, a page takes it that all of them are meant


async def page_events(
    clerk: SchedulerService, who: Principal, *, rest_s: float = _REST_S
) -> AsyncGenerator[bytes, None]:
    """Server-sent events: ``{"kinds": […], "jobs": […]}``, or ``"jobs": null`` for too many to name.

    However much happens, a page gets one message in `rest_s`, and however slow it is, no more than one is waiting.
    """
    kinds: set[str] = set()
    jobs: set[str] = set()
    news = asyncio.Event()

    async def listen() -> None:
        async for event in clerk.events(who):
            kinds.add(event.kind)
            if event.job and len(jobs) <= _MOST_JOBS:
                jobs.add(event.job)
            news.set()

    listening = asyncio.create_task(listen())
    try:
        yield b"retry: 2000\n\n"
        while not listening.done() or news.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(_either(news, listening), _HEARTBEAT_S)
            if not news.is_set():
                yield b": still here\n\n"
                continue
            news.clear()
            told = {"kinds": sorted(kinds), "jobs": sorted(jobs) if len(jobs) <= _MOST_JOBS else None}
            kinds.clear()
            jobs.clear()
            yield f"data: {json.dumps(told)}\n\n".encode()
            await asyncio.sleep(rest_s)
    finally:
        listening.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await listening


async def _either(news: asyncio.Event, listening: asyncio.Task[None]) -> None:
    waiting = asyncio.create_task(news.wait())
    try:
        await asyncio.wait({waiting, listening}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
