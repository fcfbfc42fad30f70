"""Step times and costs of jobs, measured from records."""

import pytest

from carpool.backends.profile_learner import StepSetting, StepTimeObserver, StepTimes
from carpool.core.messages import (
    AssignApplied,
    Change,
    Fact,
    JobFinished,
    JobSubmitted,
    NodeJoined,
    NodeLost,
    Planned,
    ProgressReported,
    Record,
)
from carpool.core.model import Allocation, JobId, JobSpec, Kind, NodeId
from carpool.core.topology import Cluster, Placement
from carpool.predictors.profiles.profile import Costs

A, B = JobId("a"), JobId("b")
ONE = Placement(((Kind("cpu1"), 1),))


def submitted(job: JobId) -> Fact:
    return JobSubmitted(JobSpec(job, model=f"{job}.py:main"))


def report(job: JobId, done: float) -> Fact:
    return ProgressReported(job, 1, done, 1.0)


class Records:
    """Records shown to an observer of step times."""

    def __init__(self) -> None:
        self.observer = StepTimeObserver(Cluster.build([(1, 2, "cpu1")]))
        self.at(0.0, submitted(A), submitted(B))

    def at(self, at: float, *facts: Fact, **given: Allocation | None) -> None:
        changes = tuple(Change(JobId(job), allocation) for job, allocation in given.items())
        self.observer.record(Record(at, facts, Planned("", changes, (1.0,) * len(changes)) if changes else None))


@pytest.fixture
def records() -> Records:
    return Records()


def test_the_cost_of_a_start_and_an_end_is_what_steps_do_not_take(records: Records) -> None:
    records.at(1.0, a=Allocation.of(0))
    records.at(1.5, AssignApplied(A, 1, 0.0))
    records.at(4.0, report(A, 1.0))
    records.at(6.0, report(A, 21.0))
    records.at(7.0, report(A, 31.0))
    records.observer.ended(A, 36)
    records.at(8.0, JobFinished(A, 1))
    (timed,) = records.observer.timed(A).values()
    assert (timed.steps, timed.step_s) == pytest.approx((30.0, 0.1))
    start_s, resize_s, end_s = records.observer.costs(A)
    assert (start_s, end_s) == pytest.approx((2.9, 0.5))
    assert resize_s is None


def test_a_job_that_moves_loses_only_the_time_in_which_it_made_no_steps(records: Records) -> None:
    records.at(0.0, a=Allocation.of(0))
    records.at(1.0, AssignApplied(A, 1, 0.0), report(A, 1.0))
    records.at(2.0, report(A, 2.0))
    records.at(2.0, a=Allocation.of(0, 1))
    records.at(5.0, AssignApplied(A, 2, 4.0))  # it went on for two steps of a second
    records.at(6.5, report(A, 5.0))  # and this one takes half a second
    records.at(7.0, report(A, 6.0))
    records.at(7.0, a=Allocation.of(0, 1, fraction=0.5))  # the same devices: no move
    records.at(9.0, report(A, 7.0))
    assert records.observer.costs(A) == Costs(0.0, 2.0, None)
    two = Placement(((Kind("cpu1"), 2),))
    assert {setting: timed.seconds for setting, timed in records.observer.timed(A).items()} == {
        StepSetting(ONE): 1.0,
        StepSetting(two): 0.5,
    }


def test_what_runs_beside_another_is_kept_apart_and_no_interval_spans_the_change(records: Records) -> None:
    half = Allocation.of(0, fraction=0.5)
    records.at(0.0, a=half)
    for at in (1.0, 2.0):
        records.at(at, report(A, at))
    records.at(2.5, b=half)
    for at, done in ((3.0, 2.7), (4.0, 3.2), (5.0, 3.7)):
        records.at(at, report(A, done))
    shared = Placement(((Kind("cpu1"), 1),), 0.5)
    timed = records.observer.timed(A)
    assert timed[StepSetting(shared)].seconds == 1.0
    beside = timed[StepSetting(shared, ("b.py:main",))]
    assert (beside.seconds, beside.step_s) == pytest.approx((2.0, 2.0))


def test_while_one_is_measured_alone_nothing_is_learned_of_those_that_stand_still(records: Records) -> None:
    half = Allocation.of(0, fraction=0.5)
    records.at(0.0, a=half, b=half)
    records.at(1.0, report(A, 1.0), report(B, 1.0))
    records.at(4.0, ProgressReported(A, 1, 9.0, 4.0, alone=True))
    records.at(5.0, report(A, 10.0), report(B, 2.0))
    records.at(6.0, report(A, 11.0), report(B, 3.0))
    assert [timed.seconds for timed in records.observer.timed(A).values()] == [2.0]
    assert [timed.seconds for timed in records.observer.timed(B).values()] == [1.0]


def test_a_lost_node_ends_what_ran_there_and_a_new_one_can_be_used(records: Records) -> None:
    records.at(0.0, a=Allocation.of(0))
    records.at(1.0, report(A, 1.0))
    records.at(2.0, NodeLost(NodeId(0)), NodeJoined("again", (("cpu2", 1, 0),)))
    records.at(3.0, a=Allocation.of(2))
    records.at(4.0, report(A, 2.0))
    records.at(5.0, report(A, 3.0))
    assert [setting.placement.groups for setting in records.observer.timed(A)] == [((Kind("cpu2"), 1),)]


def test_the_spread_is_that_of_single_steps() -> None:
    timed = StepTimes()
    timed.add(4, 4.0)
    assert timed.spread_s == 0.0
    timed.add(4, 8.0)
    assert (timed.step_s, timed.spread_s) == pytest.approx((1.5, 2.0**0.5))


def test_nothing_is_known_of_a_job_that_never_ran(records: Records) -> None:
    assert records.observer.timed(B) == {}
    assert records.observer.costs(JobId("c")) == Costs()


def test_of_a_job_that_ends_before_its_second_report_the_last_steps_count(records: Records) -> None:
    records.at(0.0, a=Allocation.of(0))
    records.at(1.0, AssignApplied(A, 1, 0.0), report(A, 1.0))
    records.observer.ended(A, 11)
    records.at(3.0, JobFinished(A, 1))
    (timed,) = records.observer.timed(A).values()
    assert (timed.steps, timed.seconds) == (10.0, 2.0)
    assert records.observer.costs(A).start_s == pytest.approx(0.8)
    assert records.observer.costs(A).end_s is None
