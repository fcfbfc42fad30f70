"""Halving control: facts and reports in, facts out; the same after a restart."""

from carpool.core.messages import (
    Fact,
    JobCancelled,
    JobFinished,
    JobPaused,
    JobResumed,
    JobSubmitted,
    ProgressReported,
    Record,
    ResumabilityChanged,
)
from carpool.core.model import HalvingRule, Job, JobId, JobSpec, Phase
from carpool.runtime.executor.reports import Evaluation, Sized
from carpool.service.daemon.halving_control import HalvingControl

RULE = HalvingRule("acc", True, 3, 10)


def spec(number: int, rule: HalvingRule = RULE, *, resumable: bool = True) -> JobSpec:
    return JobSpec(JobId(f"s-{number}"), array="s", user="ada", resumable=resumable, halving=rule)


class Sweep:
    """A sweep whose facts are fed back as the scheduler would record them."""

    def __init__(self, count: int, rule: HalvingRule = RULE, *, resumable: bool = True) -> None:
        self.told: list[str] = []
        self.control = HalvingControl(tell=lambda job, words: self.told.append(words))
        self.control.end_replay()
        self.feed(*(JobSubmitted(spec(number, rule, resumable=resumable)) for number in range(count)))
        for number in range(count):
            self.control.take(Sized(JobId(f"s-{number}"), 90))

    def feed(self, *facts: Fact) -> list[tuple[str, str]]:
        self.control.record(Record(0.0, facts))
        return self.settle()

    def settle(self) -> list[tuple[str, str]]:
        """What follows, by kind and job, after it was recorded."""
        found: list[tuple[str, str]] = []
        while facts := self.control.follow_up():
            self.control.record(Record(0.0, facts))
            found += [(type(fact).__name__, fact.job) for fact in facts]  # type: ignore[attr-defined]
        return found

    def evaluate(self, number: int, step: int, **metrics: float) -> list[tuple[str, str]]:
        self.control.take(Evaluation(JobId(f"s-{number}"), step, metrics))
        return self.settle()


def test_a_sweep_is_halved() -> None:
    sweep = Sweep(4)
    assert sweep.evaluate(0, 8, acc=0.9) == []
    assert sweep.evaluate(0, 12, acc=0.5) == [("JobPaused", "s-0")]
    assert sweep.evaluate(1, 10, acc=0.6) == [("JobPaused", "s-1")]
    assert sweep.evaluate(2, 10, acc=0.1) == [("JobResumed", "s-1"), ("JobPaused", "s-2")]
    assert sweep.feed(JobFinished(JobId("s-3"), 1)) == [("JobCancelled", "s-0"), ("JobCancelled", "s-2")]
    assert sweep.evaluate(1, 30, acc=0.7) == [], "it is alone"
    assert sweep.evaluate(1, 90, acc=0.8) == [], "the end is no rung"


def test_a_command_that_would_lose_its_work_is_never_held() -> None:
    sweep = Sweep(4, resumable=False)
    assert sweep.evaluate(0, 10, acc=0.5) == []
    assert sweep.evaluate(1, 10, acc=0.6) == []
    assert sweep.evaluate(2, 10, acc=0.1) == [("JobCancelled", "s-2")]


def test_a_command_that_keeps_its_work_is_held() -> None:
    sweep = Sweep(4, resumable=False)
    sweep.feed(*(ResumabilityChanged(JobId(f"s-{number}"), True) for number in range(4)))
    assert sweep.evaluate(0, 10, acc=0.5) == [("JobPaused", "s-0")]


def test_the_loss_of_training_may_be_the_metric() -> None:
    sweep = Sweep(2, HalvingRule("loss", False, 2, 10))
    assert sweep.feed(ProgressReported(JobId("s-0"), 1, 11.0, 1.0, loss=0.5)) == [("JobPaused", "s-0")]
    assert sweep.feed(ProgressReported(JobId("s-1"), 1, 11.0, 1.0, loss=0.4)) == [("JobCancelled", "s-0")]


def test_one_that_its_user_resumes_continues() -> None:
    sweep = Sweep(3)
    sweep.evaluate(0, 10, acc=0.1)
    sweep.feed(JobResumed(JobId("s-0")))
    sweep.evaluate(1, 10, acc=0.5)
    assert sweep.evaluate(2, 10, acc=0.6) == [("JobCancelled", "s-1")]


def test_a_metric_that_is_never_reported_is_told_once() -> None:
    sweep = Sweep(2)
    for number in (0, 1):
        assert sweep.evaluate(number, 10, accuracy=0.5) == []
    (words,) = sweep.told
    assert "'acc'" in words
    assert "accuracy" in words


def test_after_a_restart_held_ones_stay_held_and_the_others_continue() -> None:
    before = [JobSubmitted(spec(0)), JobSubmitted(spec(1)), JobSubmitted(spec(2)), JobPaused(JobId("s-0"), "waits")]
    control = HalvingControl()
    control.record(Record(0.0, before[:3]))
    for number, acc in ((0, 0.5), (1, 0.4)):
        control.take(Sized(JobId(f"s-{number}"), 90))
        control.take(Evaluation(JobId(f"s-{number}"), 10, {"acc": acc}))
    control.record(Record(0.0, before[3:]))
    control.end_replay()
    control.take(Sized(JobId("s-2"), 90))
    assert control.follow_up() == []
    control.take(Evaluation(JobId("s-2"), 10, {"acc": 0.1}))
    found = control.follow_up()
    assert [(type(fact), fact.job) for fact in found if isinstance(fact, JobCancelled | JobResumed)] == [
        (JobResumed, "s-0"),
        (JobCancelled, "s-2"),
    ]


def test_a_trial_older_than_the_journal_is_adopted_with_its_metrics() -> None:
    control = HalvingControl(lambda job: [(10, {"acc": 0.9}), (20, {"acc": 0.1})])
    control.adopt(Job(spec(0), 0, 0.0, Phase.PAUSED))
    control.adopt(Job(spec(1), 1, 0.0, Phase.RUNNING))
    control.end_replay()
    control.record(Record(0.0, [JobCancelled(JobId("s-1"))]))
    (fact,) = control.follow_up()
    assert isinstance(fact, JobResumed)
    assert fact.job == "s-0"
