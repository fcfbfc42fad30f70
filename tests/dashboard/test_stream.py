"""A page is told what kind of thing happened, seldom enough to keep up, and only of what it may know."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from carpool.dashboard.stream import page_events
from carpool.service.auth import Principal, Role


async def told(stream: AsyncIterator[bytes]) -> dict[str, Any]:
    async for text in stream:
        if text.startswith(b"data: "):
            found: dict[str, Any] = json.loads(text.removeprefix(b"data: "))
            return found
    raise AssertionError("the stream has ended")


def test_what_happens_meanwhile_is_told_at_once(open_room: Any) -> None:
    async def play() -> None:
        async with open_room() as room:
            stream = page_events(room.clerk, Principal("root", Role.ADMIN), rest_s=0.0)
            assert await anext(stream) == b"retry: 2000\n\n"
            listening = asyncio.create_task(told(stream))
            await asyncio.sleep(0)
            feed = room.clerk._in.events.feed
            for number in range(3):
                feed.add(0.0, "progress", f"j{number}", "ada")
            feed.add(0.0, "decision")
            assert await listening == {"kinds": ["decision", "progress"], "jobs": ["j0", "j1", "j2"]}
            for number in range(90):
                feed.add(0.0, "progress", f"j{number}", "ada")
            assert (await told(stream))["jobs"] is None
            await stream.aclose()

    asyncio.run(play())


def test_nobody_hears_of_others(open_room: Any) -> None:
    async def play() -> None:
        async with open_room() as room:
            stream = page_events(room.clerk, Principal("ben"), rest_s=0.0)
            await anext(stream)
            listening = asyncio.create_task(told(stream))
            await asyncio.sleep(0)
            feed = room.clerk._in.events.feed
            feed.add(0.0, "progress", "hers", "ada")
            feed.add(0.0, "progress", "his", "ben")
            assert await listening == {"kinds": ["progress"], "jobs": ["his"]}
            await stream.aclose()

    asyncio.run(play())


def test_the_stream_ends_with_the_feed(open_room: Any) -> None:
    async def play() -> None:
        async with open_room() as room:
            stream = page_events(room.clerk, Principal("root", Role.ADMIN), rest_s=0.0)
            await anext(stream)
            room.clerk._in.events.feed.close()
            assert [text async for text in stream if text.startswith(b"data")] == []

    asyncio.run(play())
