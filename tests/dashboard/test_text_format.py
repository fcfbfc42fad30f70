"""Amounts read well, and never say more than is known."""

from datetime import UTC

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.dashboard.text_format import duration, expected, memory, moment, percent, plain, rough
from carpool.service.queries.views import TimeEstimate


@pytest.mark.parametrize(
    ("seconds", "words"),
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
def test_durations_have_two_units_at_most(seconds: float | None, words: str) -> None:
    assert duration(seconds) == words


@given(st.floats(0.0, 1e9))
def test_every_duration_can_be_told(seconds: float) -> None:
    assert 1 <= len(duration(seconds).split()) / 2 <= 2


def test_what_is_expected_comes_with_its_spread() -> None:
    assert expected(TimeEstimate(720.0, 41.0)) == "12 min ± 41 s"
    assert expected(None) == "–"
    assert rough(0.1) == "1 s"
    assert rough(170.0) == "3 min"


def test_what_has_begun_is_not_nothing_and_what_is_not_over_not_all() -> None:
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


def test_the_date_is_told_on_another_day_only() -> None:
    now = 1_790_000_000.0
    assert moment(now, UTC, now) == "14:13:20"
    assert moment(now - 86400, UTC, now) == "20 Sep 14:13"


def test_plain_numbers_have_no_idle_digits() -> None:
    assert [plain(value) for value in (8.0, 0.5, 1 / 3, 12345.0)] == ["8", "0.5", "0.333333", "12,345"]
