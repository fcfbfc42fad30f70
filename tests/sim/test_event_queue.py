"""The heap: in order of time, then priority, then of being added."""

from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from carpool.core.messages import Fact, NodeJoined
from carpool.sim.event_queue import ARRIVALS, FAILURES, MACHINES, EventQueue


def joined(index: int, at: float) -> Fact:
    return NodeJoined(str(index))


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from((MACHINES, FAILURES, ARRIVALS)))))
def test_order(events: list[tuple[int, int]]) -> None:
    timeline = EventQueue()
    for index, (at, priority) in enumerate(events):
        timeline.add(at, priority, partial(joined, index))
    expected = sorted(range(len(events)), key=lambda index: (*events[index], index))
    assert len(timeline) == len(events)
    assert timeline.next_at == min((at for at, _ in events), default=None)
    facts = [fact for at in range(4) for fact in timeline.happen(at)]
    assert facts == [NodeJoined(str(index)) for index in expected]
    assert timeline.next_at is None


def test_what_was_overtaken_is_no_fact() -> None:
    timeline = EventQueue()
    timeline.add(1.0, MACHINES, lambda at: None)
    timeline.add(1.0, MACHINES, lambda at: NodeJoined("x"))
    assert timeline.happen(0.5) == []
    assert timeline.happen(1.0) == [NodeJoined("x")]


def test_what_follows_at_the_same_instant_is_among_them() -> None:
    timeline = EventQueue()

    def first(at: float) -> Fact:
        timeline.add(at, MACHINES, lambda _: NodeJoined("second"))
        return NodeJoined("first")

    timeline.add(1.0, ARRIVALS, first)
    assert timeline.happen(1.0) == [NodeJoined("first"), NodeJoined("second")]
