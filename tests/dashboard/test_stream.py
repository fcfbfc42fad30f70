"""Event stream of a page: merged events, and only those the user may see."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from carpool.dashboard.stream import page_events
from carpool.service.auth import Principal, Role


async def next_message(stream: AsyncIterator[bytes]) -> dict[str, Any]:
    async for text in stream:
        if text.startswith(b"data: "):
            message: dict[str, Any] = json.loads(text.removeprefix(b"data: "))
            return message
    raise AssertionError("the stream has ended")


def test_events_are_merged_into_one_message(open_dashboard: Any) -> None:
    async def play() -> None:
        async with open_dashboard() as dashboard:
            stream = page_events(dashboard.service, Principal("root", Role.ADMIN), min_interval_s=0.0)
            assert await anext(stream) == b"retry: 2000\n\n"
            listening = asyncio.create_task(next_message(stream))
            await asyncio.sleep(0)
            feed = dashboard.service._model.events.feed
            for number in range(3):
                feed.add(0.0, "progress", f"j{number}", "ada")
            feed.add(0.0, "decision")
            assert await listening == {"kinds": ["decision", "progress"], "jobs": ["j0", "j1", "j2"]}
            for number in range(90):
                feed.add(0.0, "progress", f"j{number}", "ada")
            assert (await next_message(stream))["jobs"] is None
            await stream.aclose()

    asyncio.run(play())


def test_events_of_other_users_are_hidden(open_dashboard: Any) -> None:
    async def play() -> None:
        async with open_dashboard() as dashboard:
            stream = page_events(dashboard.service, Principal("ben"), min_interval_s=0.0)
            await anext(stream)
            listening = asyncio.create_task(next_message(stream))
            await asyncio.sleep(0)
            feed = dashboard.service._model.events.feed
            feed.add(0.0, "progress", "hers", "ada")
            feed.add(0.0, "progress", "his", "ben")
            assert await listening == {"kinds": ["progress"], "jobs": ["his"]}
            await stream.aclose()

    asyncio.run(play())


def test_the_stream_ends_with_the_feed(open_dashboard: Any) -> None:
    async def play() -> None:
        async with open_dashboard() as dashboard:
            stream = page_events(dashboard.service, Principal("root", Role.ADMIN), min_interval_s=0.0)
            await anext(stream)
            dashboard.service._model.events.feed.close()
            assert [text async for text in stream if text.startswith(b"data")] == []

    asyncio.run(play())
