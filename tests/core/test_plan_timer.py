"""When a policy is asked, apart from the scheduler that asks it (see `test_cadence.py` for both together)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from carpool.core.policy import Cadence, PlanTimer

SECONDS = st.floats(0.0, 1e6)


def test_nothing_happened_and_nothing_was_asked_for() -> None:
    timing = PlanTimer(Cadence())
    assert (timing.may_be_due, timing.is_due(5.0, has_jobs=True), timing.next_at(5.0, has_jobs=True)) == (
        False,
        False,
        None,
    )


def test_a_trigger_is_put_off_until_the_interval_is_over() -> None:
    timing = PlanTimer(Cadence(min_interval_s=10.0))
    timing.planned(3.0, None)
    timing.is_triggered = True
    assert [timing.is_due(at, has_jobs=True) for at in (3.0, 12.9, 13.0)] == [False, False, True]
    timing.min_pause_s = 20.0
    assert timing.next_at(4.0, has_jobs=True) == 23.0


def test_a_plan_may_ask_for_another_whatever_the_interval() -> None:
    timing = PlanTimer(Cadence(min_interval_s=10.0))
    timing.planned(3.0, 5.0)
    assert [timing.is_due(at, has_jobs=True) for at in (4.9, 5.0)] == [False, True]


def test_rounds_begin_at_multiples_and_only_while_there_are_jobs() -> None:
    timing = PlanTimer(Cadence(round_s=360.0))
    timing.planned(720.0, None)
    assert [timing.is_due(at, has_jobs=True) for at in (720.0, 1000.0, 1080.0)] == [False, False, True]
    assert (timing.is_due(1080.0, has_jobs=False), timing.next_at(1000.0, has_jobs=False)) == (False, None)


def test_another_policy_is_asked_at_once() -> None:
    timing = PlanTimer(Cadence(min_interval_s=10.0))
    timing.planned(3.0, 100.0)
    timing.reset()
    assert timing.is_due(3.0, has_jobs=True)


@given(
    round_s=st.sampled_from([0.0, 0.0, 0.1, 7.0, 360.0]),
    interval_s=st.floats(0.0, 100.0),
    planned_at=SECONDS,
    wanted_s=st.none() | st.floats(0.001, 1000.0),
    later_s=st.floats(0.0, 1000.0),
    is_triggered=st.booleans(),
)
def test_it_is_due_when_it_said_it_would_be(
    round_s: float,
    interval_s: float,
    planned_at: float,
    wanted_s: float | None,
    later_s: float,
    is_triggered: bool,
) -> None:
    timing = PlanTimer(Cadence(min_interval_s=interval_s, round_s=round_s))
    timing.planned(planned_at, None if wanted_s is None else planned_at + wanted_s)
    timing.is_triggered = is_triggered
    at = planned_at + later_s
    due_at = timing.next_at(at, has_jobs=True)
    if due_at is None:
        assert not timing.is_due(at, has_jobs=True)
    else:
        assert timing.is_due(max(at, due_at) if not round_s else due_at, has_jobs=True)
