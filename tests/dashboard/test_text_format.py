"""Formatted durations, percentages, sizes and times."""

from datetime import UTC

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.dashboard.text_format import duration, memory, moment, percent, plain, rough


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (0.25, "0.250 s"),
        (45.4, "45 s"),
        (60.0, "1 min"),
        (200.0, "3 min 20 s"),
        (12 * 60.0, "12 min"),
        (3 * 3600 + 20 * 60.0, "3 h 20 min"),
        (90000.0, "1 d 1 h"),
        (30 * 86400.0, "30 d"),
        (None, "–"),
        (float("inf"), "–"),
    ],
)
def test_durations_have_two_units_at_most(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


@given(st.floats(0.0, 1e9))
def test_every_duration_is_formatted(seconds: float) -> None:
    assert 1 <= len(duration(seconds).split()) / 2 <= 2


def test_rough_durations_have_one_unit() -> None:
    assert rough(0.1) == "1 s"
    assert rough(170.0) == "3 min"


def test_only_exactly_0_and_1_are_0_and_100_per_cent() -> None:
    assert [percent(part) for part in (None, 0.0, 0.001, 0.5, 0.999, 1.0)] == [
        "–",
        "0 %",
        "1 %",
        "50 %",
        "99 %",
        "100 %",
    ]


def test_memory_is_in_binary_units() -> None:
    assert [memory(size) for size in (0, 512, 80 << 30, 3 << 39)] == ["–", "512 B", "80 GiB", "1.5 TiB"]


def test_the_date_is_shown_on_other_days_only() -> None:
    now = 1_790_000_000.0
    assert moment(now, UTC, now) == "14:13:20"
    assert moment(now - 86400, UTC, now) == "20 Sep 14:13"


def test_plain_numbers_have_no_trailing_zeros() -> None:
    assert [plain(value) for value in (8.0, 0.5, 1 / 3, 12345.0)] == ["8", "0.5", "0.333333", "12,345"]
