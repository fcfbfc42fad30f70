"""Reports of steps per second, with a fake clock."""

from __future__ import annotations

from carpool.runtime.engine.trainer import StepDone
from carpool.runtime.worker.rate_meter import RateMeter


def reports(meter: RateMeter, clock: list[float], seconds: list[float]) -> list[tuple[int, float, bool]]:
    """Step, rate and kind of every report for steps of these durations."""
    made = []
    for step, duration in enumerate(seconds, start=1):
        clock[0] += duration
        report = meter.count(StepDone(step, 0, 0.5, 4), dict)
        if report is not None:
            made.append((report.step, report.steps_per_s, report.probed))
    return made


def test_the_first_step_is_reported_then_five_times_a_second() -> None:
    clock = [1.0]
    meter = RateMeter(clock=lambda: clock[0])
    assert reports(meter, clock, [0.125] * 5) == [(1, 8.0, False), (3, 8.0, False), (5, 8.0, False)]


def test_a_probe_measures_its_steps_after_as_many_warmup_steps() -> None:
    clock = [1.0]
    meter = RateMeter(3, clock=lambda: clock[0])
    durations = [9.0, 7.0, 5.0, 0.5, 0.25, 0.25, 0.5, 0.5]
    assert reports(meter, clock, durations) == [(6, 3.0, True), (7, 2.0, False), (8, 2.0, False)]
