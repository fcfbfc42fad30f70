"""When a policy is asked: triggers, intervals, rounds and its own wishes."""

from dataclasses import dataclass, field

from carpool.core.messages import JobFinished, JobSubmitted, Woke
from carpool.core.model import JobId, JobSpec
from carpool.core.policy import Cadence, Plan, Policy, Snapshot
from carpool.testing import Rig


@dataclass
class Asked(Policy):
    """Notes when it is asked, and answers with what a test gives it."""

    answers: list[Plan] = field(default_factory=list)
    at: list[float] = field(default_factory=list)
    notes: list[object] = field(default_factory=list)

    def plan(self, view: Snapshot) -> Plan:
        self.at.append(view.at)
        self.notes.append(view.note)
        return self.answers.pop(0) if self.answers else Plan.NOTHING


def submit(name: str) -> JobSubmitted:
    return JobSubmitted(JobSpec(JobId(name), work=10.0))


def test_only_triggers_make_it_plan() -> None:
    policy = Asked()
    d = Rig(policy, cadence=Cadence(triggers=frozenset({JobFinished})))
    d.say(0.0, submit("a"))
    d.say(1.0, Woke())
    assert policy.at == []
    assert d.wakes() is None


def test_ignored_facts_trigger_nothing() -> None:
    policy = Asked()
    d = Rig(policy)
    d.say(0.0, submit("a"))
    d.say(1.0, JobFinished(JobId("nobody"), 1))
    assert policy.at == [0.0]


def test_plans_keep_their_distance() -> None:
    policy = Asked()
    d = Rig(policy, cadence=Cadence(min_interval_s=10.0))
    d.say(0.0, submit("a"))
    assert d.wakes() is None
    d.say(3.0, submit("b"))
    d.say(4.0, submit("c"))
    assert (policy.at, d.wakes()) == ([0.0], 10.0)
    d.say(10.0, Woke())
    assert (policy.at, d.wakes()) == ([0.0, 10.0], None)
    d.say(30.0, submit("e"))
    assert policy.at == [0.0, 10.0, 30.0]


def test_whoever_runs_it_may_ask_for_a_breath_between_plans() -> None:
    policy = Asked()
    d = Rig(policy)
    d.say(0.0, submit("a"))
    d.scheduler.timing.min_pause_s = 5.0
    d.say(1.0, submit("b"))
    assert (policy.at, d.wakes()) == ([0.0], 5.0)
    d.say(5.0, Woke())
    d.scheduler.timing.min_pause_s = 0.0
    d.say(6.0, submit("c"))
    assert policy.at == [0.0, 5.0, 6.0]


def test_a_policy_is_woken_when_it_wishes() -> None:
    policy = Asked([Plan((), "look again soon", 7.0), Plan((), "and again", 9.0), Plan.NOTHING])
    d = Rig(policy)
    d.say(0.0, submit("a"))
    assert d.wakes() == 7.0
    d.say(5.0, Woke())
    assert (policy.at, d.wakes()) == ([0.0], 7.0), "waking too early asks nobody"
    d.say(7.0, Woke())
    assert (policy.at, d.wakes()) == ([0.0, 7.0], 9.0)
    d.say(8.0, submit("b"))
    assert (policy.at, d.wakes()) == ([0.0, 7.0, 8.0], None), "the newest plan alone says when"


def test_the_sooner_of_wish_and_interval() -> None:
    policy = Asked([Plan((), "soon", 4.0)])
    d = Rig(policy, cadence=Cadence(min_interval_s=10.0))
    d.say(0.0, submit("a"))
    d.say(1.0, submit("b"))
    assert d.wakes() == 4.0
    d.say(4.0, Woke())
    assert policy.at == [0.0, 4.0], "a wish counts even within the interval"


def test_rounds() -> None:
    policy = Asked()
    d = Rig(policy, cadence=Cadence(round_s=0.1))
    assert d.wakes() is None
    d.say(0.05, submit("a"))
    assert (policy.at, d.wakes()) == ([], 0.1)
    for _ in range(50):
        d.say(d.wakes() or 0.0, Woke())
    assert len(policy.at) == 50, "whatever rounding does, each round comes once"
    assert abs(policy.at[-1] - 5.0) < 1e-9
    d.say(policy.at[-1], submit("b"))
    assert len(policy.at) == 50, "a second call at the same instant is the same round"


def test_the_first_round_is_at_zero() -> None:
    policy = Asked()
    d = Rig(policy, cadence=Cadence(round_s=360.0))
    d.say(0.0, submit("a"))
    assert (policy.at, d.wakes()) == ([0.0], 360.0)


def test_no_rounds_without_jobs() -> None:
    policy = Asked()
    d = Rig(policy, cadence=Cadence(round_s=360.0))
    d.say(360.0, Woke())
    assert (policy.at, d.wakes()) == ([], None)


def test_notes_come_back() -> None:
    policy = Asked([Plan((), "first", note={"turn": 1}), Plan((), "nothing new"), Plan((), "third", note={"turn": 2})])
    d = Rig(policy)
    for at, name in enumerate("abcd"):
        d.say(float(at), submit(name))
    assert policy.notes == [None, {"turn": 1}, {"turn": 1}, {"turn": 2}]


def test_a_plan_without_changes_is_recorded_only_if_it_says_something() -> None:
    d = Rig(Asked([Plan.NOTHING, Plan((), "wait for the big one", 5.0)]))
    d.say(0.0, submit("a"))
    d.say(1.0, submit("b"))
    assert [record.planned is None for record in d.records] == [True, False]
