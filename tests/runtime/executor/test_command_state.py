"""A command job, event by event."""

from __future__ import annotations

import math

from carpool.core.messages import AssignApplied, JobFailed, JobFinished, ProgressReported, ReleaseApplied
from carpool.core.model import JobId
from carpool.runtime.executor.command_state import CommandState, Launch, Terminate
from carpool.runtime.job_state.actions import Emit, Ended, Stopped, Tell
from carpool.runtime.job_state.types import Target, WorkerSlot
from carpool.runtime.process.protocol import Done, Joined, Stepped

JOB = JobId("legacy")
HERE, THERE = (WorkerSlot(0),), (WorkerSlot(1),)


def launched(time_limit_s: float = 0.0, retries: int = 3) -> CommandState:
    errand = CommandState(JOB, time_limit_s=time_limit_s, retries=retries)
    assert errand.order(0.0, Target(1, HERE)) == [Launch(HERE), Emit(AssignApplied(JOB, 1, 0.0))]
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
    assert errand.order(1.0, Target(2)) == [Terminate()]
    assert errand.tick(1.5) == []
    assert errand.exited(2.0, -15) == [Emit(ReleaseApplied(JOB, 2, 0.0))]
    assert errand.order(3.0, Target(3, THERE)) == [Launch(THERE), Emit(AssignApplied(JOB, 3, 0.0))]


def test_moved_it_begins_again_elsewhere() -> None:
    errand = launched()
    assert errand.order(1.0, Target(2, THERE)) == [Terminate()]
    assert errand.exited(2.0, -15) == [Launch(THERE), Emit(AssignApplied(JOB, 2, 0.0))]


def test_another_share_of_the_same_device_leaves_it_alone() -> None:
    assert launched().order(1.0, Target(2, (WorkerSlot(0, 0.5),))) == [Emit(AssignApplied(JOB, 2, 0.0))]


def test_old_orders_are_ignored() -> None:
    assert launched().order(1.0, Target(1, THERE)) == []


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
    assert CommandState(JOB).stop(0.0) == [Stopped(0)]


def stepped(step: int, loss: float = 0.5) -> Stepped:
    return Stepped(step, 0, loss, 100.0, 10.0)


def test_a_session_tells_how_far_it_is() -> None:
    errand = launched()
    assert errand.said(1.0, Joined(0, 30)) == []
    assert errand.has_session
    assert errand.said(2.0, stepped(8)) == [Emit(ProgressReported(JOB, 1, 8.0, 10.0, 0.5))]
    assert errand.said(2.0, stepped(9, math.nan)) == [Emit(ProgressReported(JOB, 1, 9.0, 10.0, None))]
    assert errand.said(3.0, Done(30, 2, 0.25, "abc", "its loop ended")) == []
    end = Ended("its loop ended", 30, 2, 0.25, {}, "abc", 100.0)
    assert errand.exited(4.0, 0) == [end, Emit(JobFinished(JOB, 1))]


def test_a_session_that_is_killed_is_begun_again_until_it_comes_no_further() -> None:
    errand = launched(retries=2)
    for step in (3, 4):
        errand.said(1.0, Joined(0, 30))
        errand.said(1.0, stepped(step))
        told, launch = errand.exited(2.0, -9)
        assert isinstance(told, Tell)
        assert launch == Launch(HERE)
    assert errand.said(3.0, Joined(2, 30)) == [Tell("goes on from its checkpoint of step 2")]
    _, fact = errand.exited(3.0, -9)
    assert isinstance(fact, Emit)
    assert isinstance(fact.fact, JobFailed)


def test_a_session_that_fails_by_itself_is_not_begun_again() -> None:
    errand = launched()
    errand.said(1.0, Joined(0, 30))
    _, fact = errand.exited(2.0, 1)
    assert isinstance(fact, Emit)
    assert isinstance(fact.fact, JobFailed)


def test_a_session_that_ends_while_it_is_asked_to_leave_has_ended() -> None:
    errand = launched()
    errand.said(1.0, Joined(0, 30))
    assert errand.order(1.0, Target(2)) == [Terminate()]
    errand.said(1.0, Done(30, 2, math.nan, "", "its loop ended"))
    assert errand.exited(2.0, 0) == [Ended("its loop ended", 30, 2), Emit(JobFinished(JOB, 1))]
