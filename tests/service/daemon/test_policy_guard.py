"""Planning takes a fifth of the time at most; quick and rare plans never wait."""

import pytest

from carpool.service.daemon.policy_guard import PlanningBudget


class Watch:
    """A clock, and what was computed: as much, unless others are busy too."""

    def __init__(self) -> None:
        self.now = 0.0
        self.computed = 0.0

    def plan(self, budget: PlanningBudget, took_s: float, computed_s: float | None = None) -> float:
        began = budget.begin()
        self.now += took_s
        self.computed += took_s if computed_s is None else computed_s
        return budget.after(began)

    def budget(self) -> PlanningBudget:
        return PlanningBudget(0.2, lambda: self.now, lambda: self.computed)


@pytest.mark.parametrize("took_s", [0.004, 0.03, 0.4])
def test_deciding_takes_a_fifth_of_the_time_in_the_long_run(took_s: float) -> None:
    watch, spent_s = Watch(), 0.0
    budget = watch.budget()
    while watch.now < 200.0:
        watch.now += watch.plan(budget, took_s)
        spent_s += took_s
    assert spent_s / watch.now == pytest.approx(0.2, abs=0.01)


def test_who_decides_seldom_never_waits() -> None:
    watch = Watch()
    budget = watch.budget()
    for _ in range(100):
        assert watch.plan(budget, 0.08) == 0.0
        watch.now += 1.0


def test_who_decides_quickly_never_waits() -> None:
    watch = Watch()
    budget = watch.budget()
    assert not any(watch.plan(budget, 0.0005) for _ in range(10_000))


def test_what_counts_is_the_time_that_others_had_to_wait() -> None:
    watch = Watch()
    assert watch.plan(watch.budget(), 1.1, computed_s=0.02) == pytest.approx(3.9)
