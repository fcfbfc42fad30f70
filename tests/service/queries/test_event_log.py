"""Everybody hears everything once and in order, however slow; who was away too long is told so."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from carpool.service.queries.event_log import Event, EventFeed


async def heard(feed: EventFeed, after: int | None, count: int) -> list[Event]:
    events: list[Event] = []
    async for event in feed.listen(after):
        events.append(event)
        if len(events) == count:
            break
    return events


def test_a_listener_hears_what_was_missed_and_what_is_to_come() -> None:
    async def play() -> list[int]:
        feed = EventFeed()
        for _ in range(3):
            feed.add(0.0, "told", "a")
        listening = asyncio.create_task(heard(feed, 1, 4))
        await asyncio.sleep(0)
        feed.add(1.0, "told", "b")
        feed.add(1.0, "told", "c")
        return [event.number for event in await listening]

    assert asyncio.run(play()) == [2, 3, 4, 5]


def test_without_a_number_only_what_is_to_come_is_heard() -> None:
    async def play() -> list[str]:
        feed = EventFeed()
        feed.add(0.0, "told", "before")
        listening = asyncio.create_task(heard(feed, None, 1))
        await asyncio.sleep(0)
        feed.add(1.0, "told", "after")
        return [event.job for event in await listening]

    assert asyncio.run(play()) == ["after"]


def test_a_closed_feed_ends_its_listeners() -> None:
    async def play() -> list[Event]:
        feed = EventFeed()
        feed.add(0.0, "told")
        listening = asyncio.create_task(heard(feed, 0, 99))
        await asyncio.sleep(0)
        feed.close()
        return await listening

    assert len(asyncio.run(play())) == 1


@given(kept=st.integers(1, 5), many=st.integers(0, 12), after=st.integers(0, 12))
def test_gaps_are_told_and_nothing_comes_twice(kept: int, many: int, after: int) -> None:
    after = min(after, many)

    async def play() -> list[Event]:
        feed = EventFeed(kept=kept)
        for _ in range(many):
            feed.add(0.0, "told")
        feed.close()
        return [event async for event in feed.listen(after)]

    events = asyncio.run(play())
    numbers = [event.number for event in events]
    assert numbers == sorted(set(numbers))
    oldest = max(1, many - kept + 1)
    missed = after + 1 < oldest
    assert [event.kind == "missed" for event in events] == [missed and place == 0 for place in range(len(events))]
    assert numbers == list(range(oldest - 1 if missed else after + 1, many + 1))


def test_who_comes_back_after_a_restart_is_told_so_and_hears_all_that_happened_since() -> None:
    async def play() -> list[tuple[str, str]]:
        before, feed = EventFeed(epoch=1), EventFeed(epoch=2)
        for _ in range(9):
            before.add(0.0, "told", "a")
        feed.add(0.0, "told", "a")  # as far as the journal tells of it again
        feed.begin()
        feed.add(1.0, "told", "b")
        again = await heard(feed, before.last, 2)
        assert len(await heard(feed, feed.last + 1, 2)) == 2
        assert await heard(feed, again[0].number, 1) == again[1:]
        assert [event.job for event in await heard(feed, 0, 2)] == ["a", "b"]
        return [(event.kind, event.job) for event in again]

    assert asyncio.run(play()) == [("missed", ""), ("told", "b")]
