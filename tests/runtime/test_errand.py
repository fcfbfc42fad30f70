"""A command job, event by event."""

from __future__ import annotations

from carpool.core.messages import AssignApplied, JobFailed, JobFinished, ReleaseApplied
from carpool.core.model import JobId
from carpool.runtime.actions import Emit, Ended, Stopped
from carpool.runtime.crew import Seat, Wish
from carpool.runtime.errand import Errand, Launch, Terminate

JOB = JobId("legacy")
HERE, THERE = (Seat(0),), (Seat(1),)


def launched(**options: float) -> Errand:
    errand = Errand(JOB, **options)
    assert errand.order(0.0, Wish(1, HERE)) == [Launch(HERE), Emit(AssignApplied(JOB, 1, 0.0))]
    return errand


def test_it_runs_and_finishes() -> None:
    end = Ended("the command ended with exit code 0")
    assert launched().exited(1.0, 0) == [end, Emit(JobFinished(JOB, 1))]


def test_a_bad_end_is_a_failure() -> None:
    for code, words in ((3, "exit code 3"), (-9, "signal 9")):
        _, fact = launched().exited(1.0, code)
        assert isinstance(fact, Emit)
        assert isinstance(fact.fact, JobFailed)
        assert words in fact.fact.error


def test_released_it_ends_and_is_begun_again() -> None:
    errand = launched()
    assert errand.order(1.0, Wish(2)) == [Terminate()]
    assert errand.tick(1.5) == []
    assert errand.exited(2.0, -15) == [Emit(ReleaseApplied(JOB, 2, 0.0))]
    assert errand.order(3.0, Wish(3, THERE)) == [Launch(THERE), Emit(AssignApplied(JOB, 3, 0.0))]


def test_moved_it_begins_again_elsewhere() -> None:
    errand = launched()
    assert errand.order(1.0, Wish(2, THERE)) == [Terminate()]
    assert errand.exited(2.0, -15) == [Launch(THERE), Emit(AssignApplied(JOB, 2, 0.0))]


def test_another_share_of_the_same_device_leaves_it_alone() -> None:
    assert launched().order(1.0, Wish(2, (Seat(0, 0.5),))) == [Emit(AssignApplied(JOB, 2, 0.0))]


def test_old_orders_are_ignored() -> None:
    assert launched().order(1.0, Wish(1, THERE)) == []


def test_a_time_limit_ends_it() -> None:
    errand = launched(time_limit_s=5.0)
    assert errand.tick(4.0) == []
    assert errand.tick(6.0) == [Terminate()]
    _, fact = errand.exited(7.0, -15)
    assert isinstance(fact, Emit)
    assert isinstance(fact.fact, JobFailed)
    assert "5 s" in fact.fact.error


def test_stopped_it_is_not_over_for_good() -> None:
    errand = launched()
    assert errand.stop(1.0) == [Terminate()]
    assert errand.exited(2.0, -15) == [Stopped(0)]
    assert Errand(JOB).stop(0.0) == [Stopped(0)]
