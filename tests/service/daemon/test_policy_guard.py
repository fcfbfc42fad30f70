"""Deciding takes a fifth of the time at most, and nobody waits who decides quickly or seldom."""

import pytest

from carpool.service.daemon.policy_guard import PlanningBudget


class Watch:
    """A clock, and what was computed: as much, unless others are busy too."""

    def __init__(self) -> None:
        self.now = 0.0
        self.computed = 0.0

    def plan(self, breath: PlanningBudget, took_s: float, computed_s: float | None = None) -> float:
        began = breath.begin()
        self.now += took_s
        self.computed += took_s if computed_s is None else computed_s
        return breath.after(began)

    def breath(self) -> PlanningBudget:
        return PlanningBudget(0.2, lambda: self.now, lambda: self.computed)


@pytest.mark.parametrize("took_s", [0.004, 0.03, 0.4])
def test_deciding_takes_a_fifth_of_the_time_in_the_long_run(took_s: float) -> None:
    watch, spent_s = Watch(), 0.0
    breath = watch.breath()
    while watch.now < 200.0:
        watch.now += watch.plan(breath, took_s)
        spent_s += took_s
    assert spent_s / watch.now == pytest.approx(0.2, abs=0.01)


def test_who_decides_seldom_never_waits() -> None:
    watch = Watch()
    breath = watch.breath()
    for _ in range(100):
        assert watch.plan(breath, 0.08) == 0.0
        watch.now += 1.0


def test_who_decides_quickly_never_waits() -> None:
    watch = Watch()
    breath = watch.breath()
    assert not any(watch.plan(breath, 0.0005) for _ in range(10_000))


def test_what_counts_is_the_time_that_others_had_to_wait() -> None:
    watch = Watch()
    assert watch.plan(watch.breath(), 1.1, computed_s=0.02) == pytest.approx(3.9)
