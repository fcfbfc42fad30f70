"""What is learned of a job, from its first order or from the middle of its life on, is its profile."""

import platform
from pathlib import Path

import pytest

from carpool.backends.profile_learner import ProfileLearner
from carpool.core.messages import (
    AssignApplied,
    Change,
    JobCrashed,
    JobSubmitted,
    NodeLost,
    Planned,
    ProgressReported,
    Record,
)
from carpool.core.model import Allocation, Job, JobId, JobSpec, NodeId, Phase
from carpool.core.topology import Cluster
from carpool.jobs.program import Program
from carpool.runtime.executor.reports import Sized

A = JobId("a")
ONE = Allocation.of(0)


@pytest.fixture
def program(tmp_path: Path) -> Program:
    (tmp_path / "net.py").write_text("def net(): ...\n")
    return Program("net.py:net", folder=str(tmp_path))


@pytest.fixture
def learner() -> ProfileLearner:
    return ProfileLearner(Cluster.build([(1, 2, "cpu1")]), "7")


def report(learner: ProfileLearner, *reports: tuple[float, float]) -> None:
    learner.take(Sized(A, 100, 16, 64))
    for at, done in reports:
        learner.record(Record(at, (ProgressReported(A, 1, done, 1.0),), None))


def test_a_job_is_followed_from_its_first_order(learner: ProfileLearner, program: Program) -> None:
    assert learner.profile(A, program, None) is None
    learner.record(Record(0.0, (JobSubmitted(JobSpec(A)),), Planned("", (Change(A, ONE),), (1.0,))))
    learner.record(Record(1.0, (AssignApplied(A, 1, 0.0),), None))
    report(learner, (3.0, 1.0), (4.0, 11.0))
    profile = learner.profile(A, program, None)
    assert profile is not None
    assert (profile.version, profile.machine, profile.stop_steps) == ("7", platform.node(), 100)
    assert [(each.devices, each.steps, each.step_s) for each in profile.measurements] == [(1, 10, 0.1)]
    assert profile.start_s == pytest.approx(2.9)
    assert learner.profile(A, Program(command=("ls",)), None) is None
    learner.forget(A)
    assert learner.profile(A, program, None) is None


def test_a_job_is_followed_from_the_middle_of_its_life(learner: ProfileLearner, program: Program) -> None:
    job = Job(JobSpec(A), 0, 0.0, Phase.RUNNING, generation=1, desired=ONE, observed=ONE, done=40.0)
    learner.take(Sized(JobId("over"), 1, 1, 1))
    learner.follow({A: job})
    report(learner, (3.0, 41.0), (5.0, 61.0))
    profile = learner.profile(A, program, None)
    assert profile is not None
    assert [(each.steps, each.step_s) for each in profile.measurements] == [(20, 0.1)]
    assert profile.start_s is None, "nobody saw it start"


def test_last_words_of_one_that_is_forgotten_mean_nothing(learner: ProfileLearner, program: Program) -> None:
    learner.record(Record(0.0, (JobSubmitted(JobSpec(A)),), Planned("", (Change(A, ONE),), (1.0,))))
    learner.forget(A)
    for fact in (
        ProgressReported(A, 1, 5.0, 1.0),
        AssignApplied(A, 1, 0.0),
        JobCrashed(A, 1, 0.0, "late"),
        NodeLost(NodeId(0)),
    ):
        learner.record(Record(2.0, (fact,), Planned("", (Change(A, None),), (0.0,))))
    assert learner.profile(A, program, None) is None
