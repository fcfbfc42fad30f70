"""Facts in, orders out: lists of orders compared with ==."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from carpool.core.errors import CarpoolError, InputError, InvalidTransition, Overbooked
from carpool.core.estimates import DeclaredEstimator
from carpool.core.messages import (
    Assign,
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
    NodeDrained,
    NodeJoined,
    NodeLost,
    Probe,
    ProgressReported,
    Release,
    ReleaseApplied,
    Woke,
)
from carpool.core.model import Allocation, Job, JobId, JobSpec, Kind, NodeId, Phase
from carpool.core.policy import Plan, Policy, Snapshot
from carpool.core.scheduler import Scheduler
from carpool.core.topology import Cluster
from carpool.policies.baselines.nonpreemptive import Fifo
from carpool.testing import Rig

A, B, C = JobId("a"), JobId("b"), JobId("c")


def submit(name: str, devices: int = 1, work: float = 100.0, **more: object) -> JobSubmitted:
    return JobSubmitted(JobSpec(JobId(name), devices, work, **more))  # type: ignore[arg-type]


def assign(name: str, generation: int, *devices: int) -> Assign:
    return Assign(JobId(name), Allocation.of(*devices), generation)


@dataclass
class Scripted(Policy):
    """Does what a test wants next."""

    script: list[Callable[[Snapshot], Plan]] = field(default_factory=list)

    def plan(self, view: Snapshot) -> Plan:
        return self.script.pop(0)(view) if self.script else Plan.NOTHING


def plan_of(*changes: Change) -> Callable[[Snapshot], Plan]:
    return lambda view: Plan(changes, "because the test says so")


# -------------------------------------------------------------------------------------------------- order of facts
def test_releases_are_folded_before_arrivals() -> None:
    d = Rig()
    d.say(0.0, submit("a", 4))
    d.answered(0.0)
    finished = d.backend.finish("a")
    assert d.say(10.0, submit("b", 4), finished) == [assign("b", 1, 0, 1, 2, 3)]
    assert [type(fact) for fact in d.records[-1].facts] == [JobFinished, JobSubmitted]


def test_one_plan_for_one_instant() -> None:
    d = Rig()
    assert d.say(0.0, submit("a", 2), submit("b", 3), submit("c", 1)) == [assign("a", 1, 0, 1)]
    planned = [record.planned for record in d.records]
    assert len(planned) == 1
    assert planned[0] is not None
    assert planned[0].changes == (Change(A, Allocation.of(0, 1)),)
    assert planned[0].believed == (1.0,)


def test_a_wish_said_after_a_submission_is_heard() -> None:
    """Cancelling and pausing rank before arrivals, but not before the arrival they are about."""
    d = Rig()
    assert d.say(0.0, submit("a"), submit("b"), JobCancelled(A), JobPaused(B)) == []
    assert d.scheduler.outcome(A) is Phase.CANCELLED
    assert d.job("b").phase is Phase.PAUSED
    assert d.records[-1].ignored == ()


@pytest.mark.parametrize(
    ("words", "phase"),
    [
        ((JobResumed(A), JobPaused(A)), Phase.PAUSED),
        ((JobPaused(A), JobResumed(A)), Phase.RUNNING),
        ((JobPaused(A), JobResumed(A), JobPaused(A)), Phase.PAUSED),
    ],
)
@pytest.mark.parametrize("paused_before", [True, False])
def test_the_last_wish_counts(words: tuple[Fact, ...], phase: Phase, paused_before: bool) -> None:
    d = Rig()
    d.say(0.0, submit("a"))
    d.answered(0.0)
    if paused_before:
        d.say(1.0, JobPaused(A))
        d.answered(1.0)
    d.say(2.0, *words)
    assert d.job("a").phase is phase


def test_a_node_that_came_and_went_is_gone() -> None:
    d = Rig(groups=[(2, 1, "V100")])
    d.say(0.0, NodeLost(NodeId(0)))
    d.say(1.0, NodeJoined("n0"), NodeLost(NodeId(0)))
    assert d.scheduler.snapshot().occupancy.lost == {0}
    d.say(2.0, NodeLost(NodeId(1)), NodeJoined("n1"))
    assert d.scheduler.snapshot().occupancy.lost == {0}


def test_time_does_not_run_backwards() -> None:
    d = Rig()
    d.say(5.0, submit("a"))
    with pytest.raises(CarpoolError, match=r"4\.0 s .* after .* 5\.0 s"):
        d.say(4.0, submit("b"))
    assert list(d.scheduler.jobs) == [A]


def test_what_cannot_be_a_fact_changes_nothing() -> None:
    d = Rig()
    d.say(0.0, submit("a"))
    d.answered(0.0)
    finished = d.backend.finish("a")
    with pytest.raises(InputError, match=r"job 'a' exists already"):
        d.say(1.0, finished, submit("a"))
    with pytest.raises(InputError, match="job 'b' exists already"):
        d.say(1.0, finished, submit("b"), submit("b"))
    with pytest.raises(InputError, match="new node 'x' has no devices"):
        d.say(1.0, finished, NodeJoined("x"))
    assert d.job("a").phase is Phase.RUNNING, "the ending in the same batch was not folded either"
    assert [type(fact) for record in d.records for fact in record.facts] == [JobSubmitted, AssignApplied]
    d.say(1.0, finished)
    with pytest.raises(InputError, match="job 'a' exists already"):
        d.say(2.0, submit("a"))


# -------------------------------------------------------------------------------------------- desired and observed
def test_life_of_a_job() -> None:
    d = Rig()
    assert d.say(0.0, submit("a", 2, 30.0)) == [assign("a", 1, 0, 1)]
    assert d.job("a").is_starting
    assert d.job("a").observed is None
    d.answered(4.0)
    a = d.job("a")
    assert (a.is_starting, a.observed, a.applied, a.rate) == (False, Allocation.of(0, 1), 1, 1.0)
    assert a.service == ((Kind("V100"), 8.0),), "devices serve nobody else from the order on"
    assert a.done_at(10.0) == 6.0
    assert d.say(34.0, d.backend.finish("a")) == []
    assert d.scheduler.outcome(A) is Phase.FINISHED
    assert d.scheduler.jobs == {}
    assert (d.scheduler.num_running, d.scheduler.num_waiting) == (0, 0)


def test_stale_facts_are_ignored_and_recorded() -> None:
    d = Rig(Scripted([plan_of(Change(A, Allocation.of(0))), plan_of(Change(A, Allocation.of(1)))]))
    d.say(0.0, submit("a"))
    d.answered(0.0)
    d.say(1.0, submit("b"))
    d.answered(1.0)
    assert d.job("a").applied == 2
    stale = [
        AssignApplied(A, 1, 5.0),
        ProgressReported(A, 1, 5.0, 1.0),
        ReleaseApplied(A, 1, 5.0),
        JobCrashed(A, 1, 5.0, "?"),
        JobFailed(A, 1, "?"),
        JobFinished(A, 1),
        JobFinished(A, 9),  # never ordered
        JobFinished(JobId("nobody"), 1),
        JobResumed(A),
        JobCancelled(JobId("nobody")),
    ]
    before = d.job("a")
    for fact in stale:
        assert d.say(2.0, fact) == []
        assert (list(d.records[-1].facts), list(d.records[-1].ignored)) == ([], [fact])
    assert d.job("a") == before


def test_one_fact_said_twice_is_taken_once() -> None:
    d = Rig()
    d.say(0.0, submit("a"))
    pause = JobPaused(A)
    d.say(1.0, pause, pause)
    assert (list(d.records[-1].facts), list(d.records[-1].ignored)) == ([pause], [pause])


def test_a_terminal_fact_wins_over_a_pending_assign() -> None:
    d = Rig(Scripted([plan_of(Change(A, Allocation.of(0))), plan_of(Change(A, Allocation.of(1)))]))
    d.say(0.0, submit("a"))
    d.answered(0.0)
    assert d.say(1.0, submit("b")) == [assign("a", 2, 1)]
    d.say(2.0, JobFinished(A, 1))
    assert d.scheduler.outcome(A) is Phase.FINISHED
    assert d.scheduler.snapshot().occupancy.num_free == 4


def test_a_terminal_fact_wins_over_a_pending_release_and_a_pause() -> None:
    d = Rig(Scripted([plan_of(Change(A, Allocation.of(0)), Change(B, Allocation.of(1))), plan_of(Change(A, None))]))
    d.say(0.0, submit("a"), submit("b"))
    d.answered(0.0)
    assert d.say(1.0, submit("c")) == [Release(A, 2)]
    d.say(2.0, JobFinished(A, 1))
    d.say(3.0, JobPaused(B))
    d.say(3.0, JobFailed(B, 1, "out of luck"))
    assert (d.scheduler.outcome(A), d.scheduler.outcome(B)) == (Phase.FINISHED, Phase.FAILED)


def test_a_report_that_comes_before_the_answer_counts() -> None:
    taught: list[tuple[Job, ProgressReported]] = []

    class Pupil(DeclaredEstimator):
        def learn(self, at: float, job: Job, report: ProgressReported) -> None:
            taught.append((job, report))

    d = Rig(estimator=Pupil())
    d.say(0.0, submit("a"))
    d.say(1.0, ProgressReported(A, 1, 3.0, 2.0))
    a = d.job("a")
    assert (a.applied, a.observed, a.done, a.rate) == (1, Allocation.of(0), 3.0, 2.0)
    assert [job.observed for job, _ in taught] == [Allocation.of(0)]


def test_service_is_kept_over_crash_and_release() -> None:
    d = Rig(Scripted([plan_of(Change(A, Allocation.of(0))), plan_of(), plan_of(Change(A, Allocation.of(1)))]))
    d.say(0.0, submit("a"))
    d.answered(0.0)
    d.say(10.0, d.backend.crash("a"))
    assert d.job("a").service == ((Kind("V100"), 10.0),)
    d.say(20.0, submit("b"))  # assigned again before the release is answered
    d.say(25.0, ReleaseApplied(A, 2, 0.0))
    assert d.job("a").service == ((Kind("V100"), 15.0),)


def test_a_probe_keeps_its_purpose() -> None:
    d = Rig(Scripted([plan_of(Change(A, Allocation.of(0), Probe(5)))]))
    assert d.say(0.0, submit("a")) == [Assign(A, Allocation.of(0), 1, Probe(5))]


# ---------------------------------------------------------------------------------------------------------- wishes
def test_cancel() -> None:
    d = Rig()
    d.say(0.0, submit("a", 4), submit("b", 4))
    d.answered(0.0)
    assert d.say(1.0, JobCancelled(B)) == [], "a waiting job holds nothing"
    assert d.say(2.0, JobCancelled(A), submit("c", 4)) == [Release(A, 2), assign("c", 1, 0, 1, 2, 3)]
    assert d.scheduler.outcome(A) is Phase.CANCELLED
    d.say(3.0, *d.backend.answer(), JobCancelled(A))
    assert {type(fact) for fact in d.records[-1].ignored} == {ReleaseApplied, JobCancelled}


def test_pause_and_resume() -> None:
    d = Rig()
    d.say(0.0, submit("a", 4), submit("b", 4))
    d.answered(0.0)
    assert d.say(5.0, JobPaused(A)) == [Release(A, 2), assign("b", 1, 0, 1, 2, 3)]
    assert d.say(6.0, JobPaused(A)) == []
    d.answered(6.0)
    assert d.job("a").phase is Phase.PAUSED
    assert d.say(7.0, JobResumed(A)) == []
    assert d.job("a").phase is Phase.WAITING
    assert d.say(9.0, d.backend.finish("b")) == [assign("a", 3, 0, 1, 2, 3)]


def test_a_waiting_job_is_paused_without_an_order() -> None:
    d = Rig()
    d.say(0.0, submit("a", 4), submit("b", 4))
    assert d.say(1.0, JobPaused(B)) == []
    assert d.job("b").generation == 0
    assert d.say(2.0, JobFinished(A, 1)) == []
    assert d.say(3.0, JobResumed(B)) == [assign("b", 1, 0, 1, 2, 3)]


def test_a_blocked_job_cannot_be_paused() -> None:
    d = Rig()
    d.say(0.0, submit("a"), submit("b", after=(A,)))
    pause = JobPaused(B)
    assert d.say(1.0, pause) == []
    assert list(d.records[-1].ignored) == [pause]


# ---------------------------------------------------------------------------------------------------- dependencies
def test_after() -> None:
    d = Rig()
    assert d.say(0.0, submit("a"), submit("b", after=(A,)), submit("c", after=(A, B))) == [assign("a", 1, 0)]
    d.answered(0.0)
    assert d.job("b").phase is Phase.BLOCKED
    assert d.say(1.0, d.backend.finish("a")) == [assign("b", 1, 0)]
    d.answered(1.0)
    assert d.job("c").phase is Phase.BLOCKED
    assert d.say(2.0, d.backend.finish("b")) == [assign("c", 1, 0)]
    d.answered(2.0)
    d.say(3.0, d.backend.finish("c"))
    assert d.say(4.0, submit("d", after=(A, B, C))) == [assign("d", 1, 0)], "all that it needs is there already"


@pytest.mark.parametrize("end", [JobCancelled(A), JobFailed(A, 1, "bad luck")])
def test_a_failed_dependency_fails_those_behind_it(end: Fact) -> None:
    d = Rig()
    d.say(0.0, submit("a"), submit("b", after=(A,)), submit("c", after=(B,)), submit("e", after=(A,)))
    d.answered(0.0)
    d.say(1.0, end)
    assert {d.scheduler.outcome(JobId(name)) for name in "bce"} == {Phase.FAILED}
    words = "cancelled" if isinstance(end, JobCancelled) else "failed"
    followed = [fact for fact in d.records[-1].facts if fact != end]
    assert followed == [
        JobFailed(B, 0, f"dependency 'a' {words}"),
        JobFailed(C, 0, "dependency 'b' failed"),
        JobFailed(JobId("e"), 0, f"dependency 'a' {words}"),
    ]
    d.say(2.0, submit("late", after=(C,)))
    assert d.scheduler.outcome(JobId("late")) is Phase.FAILED


def test_long_chains_fail_as_one() -> None:
    d = Rig()
    names = [f"j{index}" for index in range(3000)]
    chain = [submit(name, after=(JobId(before),)) for before, name in pairwise(names)]
    d.say(0.0, submit("j0"), *chain)
    d.say(1.0, JobCancelled(JobId("j0")))
    assert d.scheduler.jobs == {}


# -------------------------------------------------------------------------------------------------- crashes, nodes
def test_a_crashed_job_is_tried_again_and_then_fails() -> None:
    d = Rig()
    d.say(0.0, submit("a", retries=2), submit("b", after=(A,)))
    d.answered(0.0)
    for generation in (2, 4):
        orders = d.say(float(generation), d.backend.crash("a", "killed"))
        assert orders == [Release(A, generation), assign("a", generation + 1, 0)]
        d.answered(float(generation))
    assert d.say(9.0, d.backend.crash("a", "killed")) == [Release(A, 6)]
    assert (d.scheduler.outcome(A), d.scheduler.outcome(B)) == (Phase.FAILED, Phase.FAILED)
    assert d.records[-1].facts[1:] == [
        JobFailed(A, 5, "crashed 3 times without progress; last error: killed"),
        JobFailed(B, 0, "dependency 'a' failed"),
    ]


@pytest.mark.parametrize("reports", [True, False])
def test_progress_makes_crashes_begin_anew(reports: bool) -> None:
    d = Rig()
    d.say(0.0, submit("a", retries=1))
    d.answered(0.0)
    for step in range(1, 6):
        if reports:
            d.say(step, d.backend.progress("a", 2.0 * step))
        else:
            d.backend.done[A] = 2.0 * step
        d.say(step, d.backend.crash("a"))
        assert d.job("a").crashes == 1
        d.answered(step)


def test_a_lost_node_sends_its_jobs_back() -> None:
    d = Rig(Fifo(bypass=True), groups=[(2, 2, "V100")])
    d.say(0.0, submit("a", 2), submit("wide", 3), submit("c", 1))
    d.answered(0.0)
    assert d.say(5.0, NodeLost(NodeId(0)), submit("e", 1)) == [Release(A, 2), assign("e", 1, 3)]
    assert d.job("a").done == 5.0, "what it kept is known when the release is answered"
    assert d.job("a").crashes == 0, "a lost node is not the job's fault"
    d.say(6.0, ReleaseApplied(A, 2, 4.0))
    assert (d.job("a").done, d.job("a").observed) == (4.0, None)
    assert d.say(7.0, NodeLost(NodeId(0)), NodeLost(NodeId(9))) == []
    assert len(d.records[-1].ignored) == 2
    assert d.say(8.0, NodeJoined("n0")) == [assign("a", 3, 0, 1)]
    assert d.say(9.0, NodeJoined("n0")) == []


def test_a_new_node_brings_room() -> None:
    d = Rig(groups=[(1, 1, "V100")])
    assert d.say(0.0, submit("a", 2)) == []
    assert d.say(1.0, NodeJoined("more", (("H100", 2, 80),))) == [assign("a", 1, 1, 2)]
    assert d.scheduler.cluster.capacity == {"V100": 1, "H100": 2}
    assert d.say(2.0, NodeLost(NodeId(1))) == [Release(A, 2)]


def test_a_new_node_takes_the_place_of_a_lost_one() -> None:
    d = Rig(groups=[(2, 2, "V100")])
    like_n0 = NodeJoined("new", (("V100", 2, 0),), replaces="n0")
    assert d.say(0.0, like_n0) == []
    assert d.records[-1].ignored, "n0 is there"
    d.say(1.0, NodeLost(NodeId(0)))
    assert d.say(2.0, NodeJoined("other", (("V100", 1, 0),), replaces="n0")) == []
    assert d.records[-1].ignored, "it has fewer devices"
    d.say(3.0, submit("a", 4))
    assert d.say(4.0, like_n0) == [assign("a", 1, 0, 1, 2, 3)]
    assert [node.name for node in d.scheduler.cluster.nodes] == ["new", "n1"]
    assert d.say(5.0, NodeLost(NodeId(0)), NodeJoined("n0", (("V100", 2, 0),))) != []
    assert [node.name for node in d.scheduler.cluster.nodes] == ["new", "n1", "n0"]
    d.say(6.0, NodeDrained(NodeId(0)))
    assert d.say(7.0, NodeJoined("newer", (("V100", 2, 0),), replaces="new")) == []
    assert d.records[-1].ignored, "a drained node keeps its place"


# ----------------------------------------------------------------------------------------------------- bad policies
def test_facts_are_recorded_even_when_a_policy_breaks() -> None:
    def broken(view: Snapshot) -> Plan:
        raise ZeroDivisionError

    d = Rig(Scripted([broken]))
    with pytest.raises(ZeroDivisionError):
        d.scheduler.handle(0.0, [submit("a")])
    assert [list(record.facts) for record in d.records] == [[submit("a")]]
    assert d.say(0.0) == [], "and it is asked again"


def test_a_plan_that_overbooks_is_refused_as_a_whole() -> None:
    swap = plan_of(Change(A, Allocation.of(1)), Change(B, Allocation.of(0)))
    too_much = plan_of(Change(A, Allocation.of(2)), Change(C, Allocation.of(2)))
    d = Rig(Scripted([plan_of(Change(A, Allocation.of(0)), Change(B, Allocation.of(1))), swap, too_much]))
    d.say(0.0, submit("a"), submit("b"))
    d.answered(0.0)
    assert d.say(1.0, submit("c")) == [assign("a", 2, 1), assign("b", 2, 0)]
    with pytest.raises(Overbooked):
        d.say(2.0, submit("e"))
    d.scheduler.check()
    assert d.job("a").desired == Allocation.of(1)


def test_a_plan_touches_only_what_waits_or_runs() -> None:
    d = Rig(Scripted([plan_of(), plan_of(Change(B, Allocation.of(0))), plan_of(Change(JobId("x"), None))]))
    d.say(0.0, submit("a"), submit("b", after=(A,)))
    for name in ("b", "x"):
        with pytest.raises(CarpoolError, match=f"changed job '{name}', which is not waiting or running"):
            d.say(1.0, submit(f"other-{name}"))
    with pytest.raises(InvalidTransition, match="is waiting and cannot be released"):
        Rig(Scripted([plan_of(Change(A, None))])).say(0.0, submit("a"))


@pytest.mark.parametrize("wake_at", [4.0, 5.0])
def test_a_policy_cannot_be_woken_in_the_past(wake_at: float) -> None:
    d = Rig(Scripted([lambda view: Plan((), "later", wake_at)]))
    with pytest.raises(CarpoolError, match=rf"wake_at {wake_at} s at 5\.0 s"):
        d.say(5.0, submit("a"))


def test_woke_is_a_fact_like_any_other() -> None:
    d = Rig()
    d.say(0.0, Woke())
    assert list(d.records[0].facts) == [Woke()]


def test_a_whole_node_of_jobs_moves_at_once() -> None:
    """Two jobs may swap their devices in one plan; the map is checked when all have left."""
    cluster = Cluster.build([(1, 2, "V100")])
    script: list[Callable[[Snapshot], Plan]] = [
        plan_of(Change(A, Allocation.of(0, 1))),
        plan_of(Change(A, None), Change(B, Allocation.of(0, 1))),
    ]
    scheduler = Scheduler(cluster, Scripted(script))
    scheduler.handle(0.0, [submit("a", 2)])
    assert scheduler.handle(1.0, [submit("b", 2)]) == [Release(A, 2), assign("b", 1, 0, 1)]
    scheduler.check()
