"""What a worker reports of its pace, by a clock in the test's hand."""

from __future__ import annotations

from carpool.runtime.engine.trainer import StepDone
from carpool.runtime.worker.rate_meter import RateMeter


def reports(pace: RateMeter, clock: list[float], seconds: list[float]) -> list[tuple[int, float, bool]]:
    """The step, rate and kind of every report while steps take so long each."""
    made = []
    for step, taken in enumerate(seconds, start=1):
        clock[0] += taken
        report = pace.count(StepDone(step, 0, 0.5, 4), {})
        if report is not None:
            made.append((report.step, report.steps_per_s, report.probed))
    return made


def test_the_first_step_is_told_then_a_few_times_a_second() -> None:
    clock = [1.0]
    pace = RateMeter(clock=lambda: clock[0])
    assert reports(pace, clock, [0.125] * 5) == [(1, 8.0, False), (3, 8.0, False), (5, 8.0, False)]


def test_a_probe_measures_the_steps_asked_for_after_as_many_that_warm_up() -> None:
    clock = [1.0]
    pace = RateMeter(3, clock=lambda: clock[0])
    told = reports(pace, clock, [9.0, 7.0, 5.0, 0.5, 0.25, 0.25, 0.5, 0.5])
    assert told == [(6, 3.0, True), (7, 2.0, False), (8, 2.0, False)]
