"""Which gaps between stamped steps count."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest

MS = 1_000_000


@pytest.fixture(scope="module")
def gaps(trial: Callable[[str], ModuleType]) -> ModuleType:
    return trial("gaps")


def alternating(count: int, turn: int = 1) -> dict[str, list[tuple[int, int]]]:
    """Steps of 10 ms of two jobs, 1 ms apart within a turn and 3 ms at a switch."""
    steps: dict[str, list[tuple[int, int]]] = {"a": [], "b": []}
    at = 0
    for _ in range(count):
        for job in ("a", "b"):
            for _ in range(turn):
                steps[job].append((at, at + 10 * MS))
                at += 11 * MS
            at += 2 * MS
    return steps


def test_every_switch_between_warm_steps_counts(gaps: ModuleType) -> None:
    found = gaps.gaps_ms(alternating(20), warm=12)
    assert found == {"a": [3.0] * 7, "b": [3.0] * 7}, "the first one is warm and the last one not over"


def test_steps_within_a_turn_are_no_switches(gaps: ModuleType) -> None:
    found = gaps.gaps_ms(alternating(5, turn=4), warm=4)
    assert found == {"a": [3.0] * 3, "b": [3.0] * 3}


def test_a_job_that_never_gets_warm_counts_nothing_and_spoils_nothing(gaps: ModuleType) -> None:
    steps = {**alternating(20), "c": [(1000 * MS, 1001 * MS)], "d": []}
    found = gaps.gaps_ms(steps, warm=12)
    assert (found["c"], found["d"]) == ([], [])
    assert len(found["a"]) == 7
    assert set(gaps.steps_ms(steps, warm=12)) == {"a", "b"}


def test_steps_before_a_switch_are_told_apart(gaps: ModuleType) -> None:
    steps = alternating(5, turn=4)
    steps["a"] = [(begin, end + MS if number % 4 == 3 else end) for number, (begin, end) in enumerate(steps["a"])]
    assert gaps.steps_ms(steps, warm=0)["a"] == {"all": 10.0, "before_a_switch": 11.0}


def test_a_percentile_is_a_value_that_99_of_100_do_not_exceed(gaps: ModuleType) -> None:
    assert gaps.spread([float(value) for value in range(1, 201)])["p99"] == 198.0
    assert gaps.spread([1.0])["p99"] == 1.0
    assert gaps.spread([]) == {"count": 0}
