"""Which facts count, and which orders are given again after a restart."""

import pytest

from carpool.core.messages import Assign, JobPaused, JobResumed, JobSubmitted, Release
from carpool.core.model import Allocation, Job, JobId, JobSpec, Phase
from carpool.core.state.reconcile import is_current, orders_to_close
from carpool.testing import Rig

A = JobId("a")


@pytest.mark.parametrize(("generation", "expected"), [(1, False), (2, True), (3, True), (4, True), (5, False)])
def test_generations_that_count(generation: int, expected: bool) -> None:
    job = Job(JobSpec(A), 0, 0.0, Phase.RUNNING, Allocation.of(0), generation=4, applied=2)
    assert is_current(job, generation) is expected


def test_open_orders_are_given_again_in_order_of_submission() -> None:
    held = Allocation.of(0)
    jobs = [
        Job(JobSpec(JobId("c")), 2, 0.0, Phase.WAITING, None, 4, held, 3),  # a release on its way
        Job(JobSpec(JobId("b")), 1, 0.0, Phase.RUNNING, held, 2, held, 2),  # all is well
        Job(JobSpec(A), 0, 0.0, Phase.RUNNING, held, 1, None, 0),  # an assignment on its way
        Job(JobSpec(JobId("d")), 3, 0.0, Phase.WAITING),  # never ordered anything
    ]
    assert orders_to_close(jobs) == [Assign(A, held, 1), Release(JobId("c"), 4)]


def test_a_job_that_was_never_ordered_anything_is_left_alone() -> None:
    """Being admitted, paused while waiting, or resumed is no order, so there is nothing to repeat."""
    d = Rig(groups=[(1, 1, "V100")])
    d.say(
        0.0, JobSubmitted(JobSpec(A)), JobSubmitted(JobSpec(JobId("b"), after=(A,))), JobSubmitted(JobSpec(JobId("c")))
    )
    d.answered(0.0)
    d.say(1.0, JobPaused(JobId("c")))
    d.say(2.0, d.backend.finish("a"))
    d.answered(2.0)
    d.say(3.0, JobResumed(JobId("c")))
    assert orders_to_close(d.scheduler.jobs.values()) == []
