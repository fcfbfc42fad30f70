"""The fakes, and the doors of the package."""

import sys

import pytest

import carpool.testing
from carpool.core.messages import (
    Assign,
    AssignApplied,
    JobCrashed,
    JobFinished,
    ProgressReported,
    Release,
    ReleaseApplied,
)
from carpool.core.model import Allocation, JobId
from carpool.testing import FakeBackend, FakeClock

A = JobId("a")


def test_clock() -> None:
    clock = FakeClock(5.0)
    assert (clock.now(), clock.advance(2.5), clock.now()) == (5.0, 7.5, 7.5)
    with pytest.raises(AssertionError, match="time does not run backwards"):
        clock.advance(-1.0)


def test_backend_answers_at_once() -> None:
    backend = FakeBackend()
    assert backend.apply(0.0, [Assign(A, Allocation.of(0), 1)]) == [AssignApplied(A, 1, 0.0)]
    assert backend.progress("a", 4.0) == ProgressReported(A, 1, 4.0, 1.0)
    assert backend.apply(1.0, [Release(A, 2)]) == [ReleaseApplied(A, 2, 4.0)]
    assert backend.apply(2.0, [Assign(A, Allocation.of(0), 1)]) == [], "overtaken"
    assert backend.last_order("a") == Assign(A, Allocation.of(0), 1)
    assert [at for at, _ in backend.orders] == [0.0, 1.0, 2.0]
    assert backend.holds == {}


def test_backend_answers_later() -> None:
    backend = FakeBackend(answers_at_once=False)
    assert backend.apply(0.0, [Assign(A, Allocation.of(0), 1)]) == ()
    assert backend.answer() == [AssignApplied(A, 1, 0.0)]
    assert backend.answer() == []
    assert backend.crash("a", "x") == JobCrashed(A, 1, 0.0, "x")
    with pytest.raises(AssertionError, match="job 'a' holds nothing here"):
        backend.finish("a")
    backend.apply(1.0, [Assign(A, Allocation.of(0), 3)])
    backend.answer()
    assert backend.finish("a") == JobFinished(A, 3)
    assert backend.apply(2.0, [Assign(A, Allocation.of(0), 4)]) == ()
    assert backend.answer() == [], "it is over"


def test_every_name_is_there() -> None:
    assert sorted(carpool.testing._FROM) == carpool.testing.__all__
    for name, module in carpool.testing._FROM.items():
        if module != "reference":  # that one needs torch
            assert getattr(carpool.testing, name) is not None


def test_no_other_name_is() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Contract'"):
        _ = carpool.testing.Contract


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("scenarios", "strategies", "policy_contract"):
        monkeypatch.delitem(sys.modules, f"carpool.testing.{module}", raising=False)
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    with pytest.raises(ImportError, match=r"carpool\.testing\.PolicyContract needs hypothesis\. Install it with: pip"):
        _ = carpool.testing.PolicyContract
