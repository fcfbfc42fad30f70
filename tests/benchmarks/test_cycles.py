"""Cycles of a federation on one GPU: what is ordered, done and compared, in a room whose rates are given."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from math import sqrt
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
RATES = {"fast@10": 4000.0, "slow@10": 1000.0}  # samples per second alone


class PretendedRoom:
    """Trainings are as fast as their share of the device, or as their share of all shares where those exceed it."""

    def seat(self, guests: Sequence[Any]) -> None:
        """All are there."""

    def run(self, guests: Sequence[Any], seconds: float, *, eager: bool = False) -> list[float]:
        whole = max(100, sum(guest.share for guest in guests))
        return [RATES[guest.task.name] * guest.share / whole for guest in guests]

    def work(self, guests: Sequence[Any], steps: Sequence[int], *, eager: bool = False) -> list[float]:
        rates = self.run(guests, 0.0)
        return [count * guest.task.batch / rate for guest, count, rate in zip(guests, steps, rates, strict=True)]


@pytest.fixture
def cycles(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("sharing.cycles")


def the_mix() -> Any:
    mixes, tasks = importlib.import_module("sharing.mixes"), importlib.import_module("colocation.tasks")
    return mixes.Mix("two", (tasks.Task("fast", 10), tasks.Task("slow", 10)))


def test_measures_are_of_tasks_and_of_the_whole_cycle(cycles: ModuleType) -> None:
    base = cycles.Cycle({"a": {"x": 10, "y": 30}, "b": {"x": 10, "y": 10}}, {"a": 1.0, "b": 4.0})
    ours = cycles.Cycle({"a": {"x": 20, "y": 40}, "b": {"x": 20, "y": 0}}, {"a": 2.0, "b": 2.0})
    assert base.throughputs() == [5.0, 10.0]
    assert ours.throughputs() == [20.0, 20.0]
    assert base.idle_part == 1.0 - 5.0 / 8.0
    assert cycles.average(ours, base) == 40.0 / 15.0
    assert cycles.fairness(ours, base) == pytest.approx(sqrt(4.0 * 2.0))


def test_ours_makes_as_many_samples_and_the_devices_end_together(cycles: ModuleType) -> None:
    whole, levels = the_mix(), (20, 33, 50, 60, 80, 100)
    lanes = PretendedRoom()
    played = cycles.Fleet(whole, lanes, lanes)
    devices = cycles.fleet(whole, ((4, 1), (1, 4)), (1.0, 2.0))
    orders = cycles.ordered(cycles.federation(whole, "equal-epochs", 0.5, levels), devices)
    base = cycles.cycle_of(orders, played.in_lanes(orders, (0.5, 0.5)), devices)
    lessons = cycles.Lessons(played, 0.01)
    lessons.learn_alone()
    assert lessons.alone == list(RATES.values())
    run = cycles.run_ours(cycles.federation(whole, "shortest", 0.5, levels), devices, lessons, 6)
    ours = run.cycles[-1]
    assert sum(ours.counts()) == pytest.approx(sum(base.counts()), rel=0.01)
    assert ours.idle_part < 0.1 < base.idle_part
    assert ours.cycle_s < base.cycle_s
    assert max(each.mismatch for each in run.figures.cycles) < 0.01
