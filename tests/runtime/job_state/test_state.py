"""What the scheduler is told of its orders."""

from __future__ import annotations

from carpool.core.messages import AssignApplied, ReleaseApplied
from carpool.core.model import JobId
from carpool.runtime.job_state.actions import Emit
from carpool.runtime.job_state.state import Acks
from carpool.runtime.job_state.types import Target

JOB = JobId("a")


def test_an_order_is_open_until_it_is_answered() -> None:
    answers = Acks(JOB)
    assert answers.is_open(Target(1))
    assert answers.assigned(1, 5) == Emit(AssignApplied(JOB, 1, 5.0))
    assert not answers.is_open(Target(1))
    assert answers.is_open(Target(2))
    assert answers.released(2, 9) == Emit(ReleaseApplied(JOB, 2, 9.0))
    assert not answers.is_open(Target(2))


def test_a_job_is_assigned_from_the_answer_that_it_runs_to_the_one_that_it_does_not() -> None:
    answers = Acks(JOB)
    seen = [answers.is_assigned]
    answers.assigned(1, 0)
    seen.append(answers.is_assigned)
    answers.released(2, 0)
    seen.append(answers.is_assigned)
    assert seen == [False, True, False]


def test_an_end_belongs_to_what_the_scheduler_last_heard_to_run_else_to_its_newest_order() -> None:
    answers = Acks(JOB)
    assert answers.last_generation(Target(3)) == 3
    answers.assigned(3, 0)
    assert answers.last_generation(Target(4)) == 3
    answers.released(4, 0)
    assert answers.last_generation(Target(6)) == 6
