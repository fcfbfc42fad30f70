"""What a daemon has learned of a training is believed of the next job of it, by the next daemon too."""

from pathlib import Path

import pytest

from carpool.backends.online_estimator import OnlineEstimator
from carpool.backends.profile_learner import ProfileLearner
from carpool.backends.profile_library import PROFILES, profile_path, save_profile
from carpool.core.messages import AssignApplied, Change, JobSubmitted, Planned, ProgressReported, Record
from carpool.core.model import Allocation, JobId, JobSpec, Kind
from carpool.core.topology import Cluster, Placement
from carpool.jobs.job_file import ListedJob
from carpool.jobs.program import Program
from carpool.predictors.profiles.profile import Measurement, Profile
from carpool.runtime.executor.reports import Sized
from carpool.service.daemon.profile_store import PROFILE_FOLDER, ProfileStore, SharedProfiles

A, B = JobId("a"), JobId("b")
CLUSTER = Cluster.build([(1, 2, "cpu1")])
ONE = Placement(((Kind("cpu1"), 1),))


@pytest.fixture
def program(tmp_path: Path) -> Program:
    (tmp_path / "net.py").write_text("def net(): ...\n")
    return Program("net.py:net", folder=str(tmp_path))


class Daemons:
    """One daemon after another over the same folder."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self.begin()

    def begin(self) -> None:
        self.estimator, self.learner = OnlineEstimator(CLUSTER), ProfileLearner(CLUSTER, "1")
        self.store = ProfileStore(SharedProfiles(self.state), self.learner, self.estimator)

    def train(self, job: JobId, program: Program, step_s: float) -> None:
        self.store.introduce([ListedJob(JobSpec(job), program)])
        change = Change(job, Allocation.of(0))
        self.learner.record(Record(0.0, (JobSubmitted(JobSpec(job)),), Planned("", (change,), (1.0,))))
        self.learner.record(Record(1.0, (AssignApplied(job, 1, 0.0),), None))
        self.learner.take(Sized(job, 100, 16, 64))
        for done in (1.0, 11.0):
            self.learner.record(Record(1.0 + step_s * done, (ProgressReported(job, 1, done, 1 / step_s),), None))
        self.store.close(job, program)

    def rate(self, job: JobId, program: Program) -> tuple[float, str]:
        self.store.introduce([ListedJob(JobSpec(job), program)])
        belief = self.estimator.first_belief(JobSpec(job), ONE)
        return belief.rate.mean, belief.basis


@pytest.fixture
def daemons(tmp_path: Path) -> Daemons:
    return Daemons(tmp_path / "state")


def test_the_next_daemon_begins_with_what_was_learned(daemons: Daemons, program: Program) -> None:
    assert daemons.rate(A, program) == (1.0, "guessed")
    daemons.train(A, program, step_s=0.1)
    daemons.begin()
    rate, why = daemons.rate(B, program)
    assert rate == pytest.approx(10.0)
    assert why != "guessed"
    assert daemons.estimator.total(B) == 100.0
    daemons.train(B, program, step_s=0.3)
    daemons.begin()
    assert 3.0 < daemons.rate(A, program)[0] < 10.0, "both have taught"


def test_other_arguments_are_another_training(daemons: Daemons, program: Program) -> None:
    daemons.train(A, program, step_s=0.1)
    assert daemons.rate(B, Program(program.entry, {"lr": 1.0}, folder=program.folder)) == (1.0, "guessed")
    assert daemons.rate(B, Program(command=("ls",), folder=program.folder)) == (1.0, "guessed")


def test_what_somebody_has_measured_is_believed_too(daemons: Daemons, program: Program) -> None:
    made = Profile("net.py:net", {}, "", 16, 64, 50, None, (Measurement("cpu1", 1, 16, step_s=0.02),))
    save_profile(made, profile_path(made, Path(program.folder) / PROFILES))
    assert daemons.rate(A, program)[0] == pytest.approx(50.0)


def test_a_damaged_profile_counts_for_nothing(daemons: Daemons, program: Program) -> None:
    daemons.train(A, program, step_s=0.1)
    (path,) = (daemons.state / PROFILE_FOLDER).iterdir()
    path.write_text("{")
    daemons.begin()
    assert daemons.rate(B, program) == (1.0, "guessed")


def test_a_folder_that_takes_nothing_stops_nobody(daemons: Daemons, program: Program) -> None:
    daemons.state.write_text("no folder")
    daemons.train(A, program, step_s=0.1)
    assert daemons.rate(B, Program("x" * 400 + ".py:net", folder=program.folder)) == (1.0, "guessed")
