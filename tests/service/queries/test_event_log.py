"""EventFeed: every listener gets each event once and in order, or a missed event."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from carpool.service.queries.event_log import Event, EventFeed


async def receive(feed: EventFeed, after: int | None, count: int) -> list[Event]:
    events: list[Event] = []
    async for event in feed.listen(after):
        events.append(event)
        if len(events) == count:
            break
    return events


def test_a_listener_gets_buffered_and_new_events() -> None:
    async def scenario() -> list[int]:
        feed = EventFeed()
        for _ in range(3):
            feed.add(0.0, "told", "a")
        listening = asyncio.create_task(receive(feed, 1, 4))
        await asyncio.sleep(0)
        feed.add(1.0, "told", "b")
        feed.add(1.0, "told", "c")
        return [event.number for event in await listening]

    assert asyncio.run(scenario()) == [2, 3, 4, 5]


def test_without_a_number_a_listener_gets_only_new_events() -> None:
    async def scenario() -> list[str]:
        feed = EventFeed()
        feed.add(0.0, "told", "before")
        listening = asyncio.create_task(receive(feed, None, 1))
        await asyncio.sleep(0)
        feed.add(1.0, "told", "after")
        return [event.job for event in await listening]

    assert asyncio.run(scenario()) == ["after"]


def test_closing_the_feed_ends_its_listeners() -> None:
    async def scenario() -> list[Event]:
        feed = EventFeed()
        feed.add(0.0, "told")
        listening = asyncio.create_task(receive(feed, 0, 99))
        await asyncio.sleep(0)
        feed.close()
        return await listening

    assert len(asyncio.run(scenario())) == 1


@given(kept=st.integers(1, 5), many=st.integers(0, 12), after=st.integers(0, 12))
def test_gaps_are_reported_and_no_event_comes_twice(kept: int, many: int, after: int) -> None:
    after = min(after, many)

    async def scenario() -> list[Event]:
        feed = EventFeed(max_events=kept)
        for _ in range(many):
            feed.add(0.0, "told")
        feed.close()
        return [event async for event in feed.listen(after)]

    events = asyncio.run(scenario())
    numbers = [event.number for event in events]
    assert numbers == sorted(set(numbers))
    oldest = max(1, many - kept + 1)
    missed = after + 1 < oldest
    assert [event.kind == "missed" for event in events] == [missed and place == 0 for place in range(len(events))]
    assert numbers == list(range(oldest - 1 if missed else after + 1, many + 1))


def test_a_listener_that_reconnects_after_a_restart_gets_missed_and_all_events_since() -> None:
    async def scenario() -> list[tuple[str, str]]:
        before, feed = EventFeed(epoch=1), EventFeed(epoch=2)
        for _ in range(9):
            before.add(0.0, "told", "a")
        feed.add(0.0, "told", "a")  # replayed from the journal
        feed.end_replay()
        feed.add(1.0, "told", "b")
        again = await receive(feed, before.last, 2)
        assert len(await receive(feed, feed.last + 1, 2)) == 2
        assert await receive(feed, again[0].number, 1) == again[1:]
        assert [event.job for event in await receive(feed, 0, 2)] == ["a", "b"]
        return [(event.kind, event.job) for event in again]

    assert asyncio.run(scenario()) == [("missed", ""), ("told", "b")]
