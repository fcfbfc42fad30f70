"""Which losses of workers add up."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from carpool.runtime.job_state.state import RetryBudget


def test_losses_in_one_step_add_up_though_steps_before_it_are_made_again() -> None:
    losses = RetryBudget(3)
    assert losses.lost(9) == ""
    losses.progressed(4)
    assert losses.lost(9) == ""
    losses.progressed(9)
    assert losses.lost(9) == "workers were lost 3 times without completing step 10"


@given(st.lists(st.integers(0, 50), unique=True))
def test_losses_in_steps_of_their_own_never_add_up(steps: list[int]) -> None:
    """However far the job falls back in between."""
    losses = RetryBudget(2)
    assert [losses.lost(step) for step in steps] == [""] * len(steps)


def test_a_step_that_was_completed_starts_anew() -> None:
    losses = RetryBudget(2)
    assert losses.lost(9) == ""
    losses.progressed(10)
    assert losses.lost(9) == ""
    assert losses.lost(9) != ""
    assert losses.high == 10
