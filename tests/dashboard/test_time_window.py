"""Time windows: query strings, navigation and ticks."""

from datetime import UTC, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.dashboard.time_window import TimeWindow

NOW = 1_790_000_000.0


def test_the_query_selects_the_range() -> None:
    assert TimeWindow.read({"last": "600"}, NOW) == TimeWindow(NOW - 600, NOW)
    assert TimeWindow.read({"from": "1000", "to": "2000"}, NOW) == TimeWindow(1000.0, 2000.0, is_live=False)


@pytest.mark.parametrize(
    "query", [{}, {"last": "x"}, {"last": "nan"}, {"last": "-5"}, {"from": "9", "to": "3"}, {"from": "1"}]
)
def test_an_invalid_query_is_the_last_hour(query: dict[str, str]) -> None:
    assert TimeWindow.read(query, NOW) == TimeWindow(NOW - 3600, NOW)


@given(st.dictionaries(st.sampled_from(["last", "from", "to"]), st.text(max_size=20) | st.floats().map(str)))
def test_any_query_is_parsed(query: dict[str, str]) -> None:
    window = TimeWindow.read(query, NOW)
    assert 10.0 <= window.length <= 367 * 86400
    assert len(window.ticks(UTC)) <= 8
    for moved in (window.moved(NOW, by=-0.5), window.moved(NOW, zoom=2.0), window.moved(NOW, by=0.5)):
        TimeWindow.read(moved, NOW)


def test_moving_back_stops_and_moving_forward_resumes_live_updates() -> None:
    live = TimeWindow(NOW - 600, NOW)
    earlier = TimeWindow.read(live.moved(NOW, by=-0.5), NOW)
    assert earlier == TimeWindow(NOW - 900, NOW - 300, is_live=False)
    assert TimeWindow.read(earlier.moved(NOW, by=0.5), NOW) == live
    assert live.moved(NOW, zoom=0.5) == {"last": "300"}


def test_ticks_are_round_local_times() -> None:
    window = TimeWindow(NOW - 3600, NOW)  # from 13:13:20 UTC
    assert [tick.label for tick in window.ticks(UTC)] == ["13:20", "13:30", "13:40", "13:50", "14:00", "14:10"]
    kathmandu = timezone(timedelta(hours=5, minutes=45))
    assert [tick.label for tick in window.ticks(kathmandu)][:2] == ["19:00", "19:10"]
