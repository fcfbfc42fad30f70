"""Stories and errors: what people read."""

import pytest

from carpool.core.errors import InputError, InvalidTransition, UnknownName
from carpool.core.job_history import HistoryLabels, describe_request, job_history
from carpool.core.messages import (
    AssignApplied,
    Change,
    Fact,
    JobCancelled,
    JobCrashed,
    JobFailed,
    JobFinished,
    JobPaused,
    JobResumed,
    JobSubmitted,
    NodeLost,
    Planned,
    ProgressReported,
    Record,
    ReleaseApplied,
)
from carpool.core.model import Allocation, JobId, JobSpec, NodeId, Past
from carpool.policies.baselines.nonpreemptive import Fifo
from carpool.sim.failures import ScheduledFailures
from carpool.testing import drive
from carpool.testing.scenarios import CALM, TROUBLE

A = JobId("a")


@pytest.mark.parametrize(
    ("fact", "words"),
    [
        (JobSubmitted(JobSpec(A, 2, 30.0, "vgg16")), "was submitted: 2 devices, of 30 units of work (vgg16)"),
        (JobSubmitted(JobSpec(A)), "was submitted: 1 device, of unknown length"),
        (AssignApplied(A, 3, 4.5), "runs (generation 3) from 4.5 units of work"),
        (ReleaseApplied(A, 3, 4.5), "released its devices after 4.5 units of work"),
        (ProgressReported(A, 3, 4.5, 2.0), "has done 4.5 units at 2/s"),
        (ProgressReported(A, 3, 4.5, 2.0, 0.25), "has done 4.5 units at 2/s, loss 0.25"),
        (JobCrashed(A, 3, 4.5, "killed"), "crashed; 4.5 units of work are saved: killed"),
        (JobFailed(A, 3, "bad luck"), "failed: bad luck"),
        (JobFinished(A, 3), "finished"),
        (JobPaused(A), "was paused by the user"),
        (JobResumed(A), "was resumed by the user"),
        (JobCancelled(A), "was cancelled by the user"),
    ],
)
def test_facts_in_words(fact: Fact, words: str) -> None:
    other = JobId("b")
    records = [Record(7.0, [JobFinished(other, 1), fact, NodeLost(NodeId(0))])]
    assert list(job_history(records, A)) == [(7.0, words)]
    assert list(job_history(records, JobId("c"))) == []


def test_decisions_in_words() -> None:
    changes = (
        Change(A, Allocation.of(0, 1, 2, 5)),
        Change(JobId("b"), None),
        Change(A, Allocation.of(3, fraction=0.5)),
    )
    records = [Record(1.0, (), Planned("it is next", changes, (2.0, 0.0, 0.5)), [JobFinished(A, 1)])]
    assert list(job_history(records, A)) == [
        (1.0, "gets devices 0–2, 5, 2 units/s expected: it is next"),
        (1.0, "gets device 3 at 50%, 0.5 units/s expected: it is next"),
        (1.0, "a late JobFinished was ignored"),
    ]
    assert list(job_history(records, JobId("b"))) == [(1.0, "is preempted: it is next")]


def test_a_speed_that_is_only_guessed_is_not_told() -> None:
    changes = Change(A, Allocation.of(0)), Change(JobId("b"), Allocation.of(1))
    records = [Record(1.0, (), Planned("it is next", changes, (1.0, 1.0), guessed=(A,)))]
    assert list(job_history(records, A)) == [(1.0, "gets device 0, rate not known yet: it is next")]
    assert list(job_history(records, JobId("b"))) == [(1.0, "gets device 1, 1 units/s expected: it is next")]


def test_work_and_devices_are_called_what_they_are_called_there() -> None:
    changes = (Change(A, Allocation.of(0, 1)), Change(A, Allocation.of(1, 2)))
    facts = [AssignApplied(A, 3, 4.0), ProgressReported(A, 3, 5.0, 2.0)]
    records = [Record(1.0, facts, Planned("it is next", changes, (2.0, 2.0)))]
    assert [told for _, told in job_history(records, A, words=HistoryLabels("steps", {0: "cpu:0", 1: "cpu:1"}))] == [
        "runs (generation 3) from 4 steps",
        "has done 5 steps at 2/s",
        "gets cpu:0, cpu:1, 2 steps/s expected: it is next",
        "gets devices 1–2, 2 steps/s expected: it is next",
    ]


def test_a_whole_life() -> None:
    run = drive(Fifo(), CALM["one job"].cluster, CALM["one job"].arrivals)
    assert run.story("a").splitlines() == [
        "0 s: was submitted: 1 device, of 10 units of work",
        "0 s: gets device 0, 1 units/s expected: started the next 1 in the queue",
        "0 s: runs (generation 1) from 0 units of work",
        "10 s: finished",
    ]


def test_the_loss_of_a_node_is_told_to_those_on_it() -> None:
    ground = TROUBLE["a node is lost and comes back"]
    run = drive(Fifo(), ground.cluster, ground.arrivals, failures=(ScheduledFailures(ground.mishaps),))
    lost = {name: [line for line in run.story(name).splitlines() if "was lost" in line] for name in ("a", "b", "late")}
    assert lost == {
        "a": ["3 s: lost its devices: node n0 was lost"],
        "b": ["9 s: lost its devices: node n1 was lost"],
        "late": [],
    }


def test_the_end_by_somebody_elses_fault_is_told() -> None:
    """A job that fails because another did has an end in its story."""
    records = [
        Record(0.0, [JobSubmitted(JobSpec(A))]),
        Record(1.0, [JobFailed(A, 0, "dependency 'b' failed")]),
    ]
    assert list(job_history(records, A))[-1] == (1.0, "failed: dependency 'b' failed")


def test_a_story_is_told_oldest_first() -> None:
    assert Past(2.5, "was released", Past(1.0, "was submitted")).lines() == (
        "1.000 s was submitted",
        "2.500 s was released",
    )


# ---------------------------------------------------------------------------------------------------------- errors
@pytest.mark.parametrize(
    ("error", "words"),
    [
        (InputError("at_s is 'x'"), "at_s is 'x'"),
        (InputError("at_s is 'x'", where="f.csv: row 2"), "f.csv: row 2: at_s is 'x'"),
        (InputError("it ends.", where="f", way_out="Go on."), "f: it ends. Go on."),
        (UnknownName("policy", "fifi", ["sjf", "fifo"]), "unknown policy 'fifi'. Did you mean fifo?"),
        (UnknownName("policy", "xyz", ["sjf", "fifo"], where="f"), "f: unknown policy 'xyz'. Known: fifo, sjf."),
        (UnknownName("policy", "xyz", []), "unknown policy 'xyz'. Known: none."),
        (InvalidTransition("a", "over", "start", ()), "job 'a' is over and cannot start. History: none"),
    ],
)
def test_errors_give_value_limit_and_way_out(error: Exception, words: str) -> None:
    assert str(error) == words


def test_a_request_names_weight_limits_and_retries() -> None:
    spec = JobSpec(A, 2, weight=24.0, priority=1, min_devices=1, max_devices=4, ram_bytes=3 << 30, retries=5)
    assert describe_request(spec) == "2 devices (1 to 4), weight 3, priority high, 3 GiB RAM per device, 5 retries"
    limited = describe_request(JobSpec(A, after=(JobId("b"), JobId("c"))), 3600.0)
    assert limited == "1 device, at most 3600 s of running (time_limit), after b, c"
