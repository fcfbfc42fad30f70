"""Blocks of a device never overlap, and cover what was held: no more, no less."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.dashboard.time_window import TimeWindow
from carpool.dashboard.timeline import Block, stack_blocks
from carpool.service.queries.views import SpanView

WINDOW = TimeWindow(0.0, 100.0)


def span(job: str, since: float, until: float | None, fraction: float = 1.0) -> SpanView:
    return SpanView(0, job, fraction, since, until)


@st.composite
def spans(draw: st.DrawFn) -> list[SpanView]:
    found = []
    for number in range(draw(st.integers(0, 8))):
        since = draw(st.integers(-50, 120))
        until = draw(st.none() | st.integers(since, 150))
        fraction = draw(st.sampled_from([0.25, 0.5, 0.75, 1.0]))
        found.append(span(f"j{number}", float(since), None if until is None else float(until), fraction))
    return found


def area(block: Block) -> float:
    return (block.right - block.left) * (block.bottom - block.top)


@given(spans(), st.floats(0.0, 100.0))
def test_blocks_never_overlap_and_stay_inside(found: list[SpanView], now: float) -> None:
    blocks = stack_blocks(found, WINDOW, now)
    for block in blocks:
        assert 0.0 <= block.left < block.right <= 1.0
        assert 0.0 <= block.top < block.bottom <= 1.0
    for one, other in combinations(blocks, 2):
        wide = min(one.right, other.right) - max(one.left, other.left)
        high = min(one.bottom, other.bottom) - max(one.top, other.top)
        assert wide <= 0.0 or high <= 1e-9


@given(spans())
def test_what_is_drawn_is_what_was_held(found: list[SpanView]) -> None:
    there = [each for each in found if each.until is None or each.until > each.since]
    held = sum(
        min(
            1.0,
            sum(
                each.fraction for each in there if each.since <= second < (100.0 if each.until is None else each.until)
            ),
        )
        for second in range(100)
    )
    assert 100 * sum(map(area, stack_blocks(found, WINDOW, 100.0))) == pytest.approx(held)


def test_a_block_goes_on_where_nothing_changes_for_it() -> None:
    blocks = stack_blocks([span("a", 0.0, 50.0, 0.5), span("b", 20.0, 30.0, 0.5)], WINDOW, 100.0)
    assert blocks == [Block("a", 0.0, 0.5, 0.0, 0.5, 0.5), Block("b", 0.2, 0.3, 0.5, 1.0, 0.5)]


def test_an_overbooked_device_is_divided() -> None:
    blocks = stack_blocks([span("a", 0.0, None), span("b", 0.0, None)], WINDOW, 60.0)
    assert blocks == [Block("a", 0.0, 0.6, 0.0, 0.5, 1.0), Block("b", 0.0, 0.6, 0.5, 1.0, 1.0)]
