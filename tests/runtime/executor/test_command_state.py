"""State machine of a command job."""

from __future__ import annotations

import math

from carpool.core.messages import AssignApplied, JobFailed, JobFinished, ProgressReported, ReleaseApplied
from carpool.core.model import JobId
from carpool.runtime.executor.command_state import CommandState, Launch, Terminate
from carpool.runtime.job_state.actions import Emit, Ended, Note, Stopped
from carpool.runtime.job_state.types import Target, WorkerSlot
from carpool.runtime.process.protocol import Done, Joined, Stepped

JOB = JobId("legacy")
HERE, THERE = (WorkerSlot(0),), (WorkerSlot(1),)


def launched(time_limit_s: float = 0.0, retries: int = 3) -> CommandState:
    command = CommandState(JOB, time_limit_s=time_limit_s, retries=retries)
    assert command.order(0.0, Target(1, HERE)) == [Launch(HERE), Emit(AssignApplied(JOB, 1, 0.0))]
    return command


def test_a_command_runs_and_finishes() -> None:
    end = Ended("the command ended with exit code 0")
    assert launched().exited(1.0, 0) == [end, Emit(JobFinished(JOB, 1))]


def test_a_bad_exit_is_a_failure() -> None:
    for code, error in ((3, "exit code 3"), (-9, "signal 9")):
        _, fact = launched().exited(1.0, code)
        assert isinstance(fact, Emit)
        assert isinstance(fact.fact, JobFailed)
        assert error in fact.fact.error


def test_a_released_command_is_terminated_and_started_again_later() -> None:
    command = launched()
    assert command.order(1.0, Target(2)) == [Terminate()]
    assert command.tick(1.5) == []
    assert command.exited(2.0, -15) == [Emit(ReleaseApplied(JOB, 2, 0.0))]
    assert command.order(3.0, Target(3, THERE)) == [Launch(THERE), Emit(AssignApplied(JOB, 3, 0.0))]


def test_a_moved_command_starts_again_on_the_other_device() -> None:
    command = launched()
    assert command.order(1.0, Target(2, THERE)) == [Terminate()]
    assert command.exited(2.0, -15) == [Launch(THERE), Emit(AssignApplied(JOB, 2, 0.0))]


def test_another_share_of_the_same_device_changes_nothing() -> None:
    assert launched().order(1.0, Target(2, (WorkerSlot(0, 0.5),))) == [Emit(AssignApplied(JOB, 2, 0.0))]


def test_old_orders_are_ignored() -> None:
    assert launched().order(1.0, Target(1, THERE)) == []


def test_a_time_limit_ends_a_command() -> None:
    command = launched(time_limit_s=5.0)
    assert command.tick(4.0) == []
    assert command.tick(6.0) == [Terminate()]
    _, fact = command.exited(7.0, -15)
    assert isinstance(fact, Emit)
    assert isinstance(fact.fact, JobFailed)
    assert "5 s" in fact.fact.error


def test_a_stopped_command_can_be_resumed() -> None:
    command = launched()
    assert command.stop(1.0) == [Terminate()]
    assert command.exited(2.0, -15) == [Stopped(0)]
    assert CommandState(JOB).stop(0.0) == [Stopped(0)]


def stepped(step: int, loss: float = 0.5) -> Stepped:
    return Stepped(step, 0, loss, 100.0, 10.0)


def test_a_session_reports_progress() -> None:
    command = launched()
    assert command.message(1.0, Joined(0, 30)) == []
    assert command.has_session
    assert command.message(2.0, stepped(8)) == [Emit(ProgressReported(JOB, 1, 8.0, 10.0, 0.5))]
    assert command.message(2.0, stepped(9, math.nan)) == [Emit(ProgressReported(JOB, 1, 9.0, 10.0, None))]
    assert command.message(3.0, Done(30, 2, 0.25, "abc", "its loop ended")) == []
    end = Ended("its loop ended", 30, 2, 0.25, {}, "abc", 100.0)
    assert command.exited(4.0, 0) == [end, Emit(JobFinished(JOB, 1))]


def test_a_killed_session_is_restarted_until_it_makes_no_progress() -> None:
    command = launched(retries=2)
    for step in (3, 4):
        command.message(1.0, Joined(0, 30))
        command.message(1.0, stepped(step))
        note, launch = command.exited(2.0, -9)
        assert isinstance(note, Note)
        assert launch == Launch(HERE)
    assert command.message(3.0, Joined(2, 30)) == [Note("resumes from its checkpoint of step 2")]
    _, fact = command.exited(3.0, -9)
    assert isinstance(fact, Emit)
    assert isinstance(fact.fact, JobFailed)


def test_a_session_that_fails_by_itself_is_not_restarted() -> None:
    command = launched()
    command.message(1.0, Joined(0, 30))
    _, fact = command.exited(2.0, 1)
    assert isinstance(fact, Emit)
    assert isinstance(fact.fact, JobFailed)


def test_a_session_that_ends_during_termination_has_finished() -> None:
    command = launched()
    command.message(1.0, Joined(0, 30))
    assert command.order(1.0, Target(2)) == [Terminate()]
    command.message(1.0, Done(30, 2, math.nan, "", "its loop ended"))
    assert command.exited(2.0, 0) == [Ended("its loop ended", 30, 2), Emit(JobFinished(JOB, 1))]
