"""Who may join the queue: after those it waits for, and no more of an array than it says."""

from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.core.messages import Fact, JobCancelled, JobFailed, JobFinished, JobPaused, JobResumed, JobSubmitted
from carpool.core.model import HalvingRule, JobId, JobSpec, Phase
from carpool.core.scheduler import Scheduler
from carpool.core.state.state_snapshot import snapshot_from_json, snapshot_to_json
from carpool.core.topology import Cluster
from carpool.policies.baselines.nonpreemptive import Fifo
from carpool.testing.rig import check_state

WIDE = Cluster.build([(1, 8, "V100")])


def member(number: int, at_most: int = 2, **fields: object) -> JobSpec:
    return JobSpec(JobId(f"s-{number}"), 1, 10.0, array="s", at_most=at_most, **fields)  # type: ignore[arg-type]


def phases(scheduler: Scheduler) -> str:
    """The phases of the members that are not over, by their first letters."""
    return "".join(job.phase[0] for job in sorted(scheduler.jobs.values(), key=lambda job: job.seq))


def submitted(count: int, at_most: int = 2) -> Scheduler:
    scheduler = Scheduler(WIDE, Fifo())
    scheduler.handle(0.0, [JobSubmitted(member(number, at_most)) for number in range(count)])
    check_state(scheduler)
    return scheduler


def test_no_more_of_an_array_run_at_once_than_it_says() -> None:
    scheduler = submitted(5)
    assert phases(scheduler) == "rrbbb"
    scheduler.handle(1.0, [JobFinished(JobId("s-0"), 1)])
    assert phases(scheduler) == "rrbb"
    scheduler.handle(2.0, [JobFailed(JobId("s-1"), 1, "by itself"), JobCancelled(JobId("s-3"))])
    assert [*scheduler.jobs] == ["s-2", "s-4"], "who fails makes room too, and whoever was cancelled is passed over"
    assert phases(scheduler) == "rr"


def test_a_paused_one_keeps_its_place_and_other_arrays_have_their_own() -> None:
    scheduler = submitted(3)
    scheduler.handle(1.0, [JobPaused(JobId("s-0"))])
    assert phases(scheduler) == "prb"
    other = JobSpec(JobId("other"), 1, 10.0, array="s", at_most=2, user="ada")
    scheduler.handle(2.0, [JobSubmitted(other), JobSubmitted(JobSpec(JobId("plain"), 1, 10.0))])
    assert phases(scheduler) == "prbrr"


RULE = HalvingRule("acc", True, 3, 10)


def test_one_held_by_its_sweep_gives_up_its_place_and_is_first_in_line_when_resumed() -> None:
    scheduler = Scheduler(WIDE, Fifo())
    scheduler.handle(0.0, [JobSubmitted(member(number, 1, halving=RULE)) for number in range(4)])
    scheduler.handle(1.0, [JobPaused(JobId("s-0"), "waits at rung 1")])
    assert phases(scheduler) == "prbb"
    assert scheduler.why(scheduler.jobs[JobId("s-0")]) == "waits at rung 1"
    state = snapshot_from_json(snapshot_to_json(scheduler.state()))
    restored = Scheduler(WIDE, Fifo())
    restored.restore(state)
    for each in (scheduler, restored):
        each.handle(2.0, [JobResumed(JobId("s-0"), "continues past rung 1")])
        check_state(each)
        assert phases(each) == "brbb", "its array is full"
        each.handle(3.0, [JobCancelled(JobId("s-1"), "stopped at rung 1")])
        check_state(each)
        assert phases(each) == "rbb"
        each.handle(4.0, [JobFinished(JobId("s-0"), 3)])
        assert phases(each) == "rb"


def test_one_that_finished_while_it_was_held_is_finished() -> None:
    scheduler = Scheduler(WIDE, Fifo())
    scheduler.handle(0.0, [JobSubmitted(member(number, 1, halving=RULE)) for number in range(2)])
    scheduler.handle(1.0, [JobPaused(JobId("s-0"), "waits at rung 1")])
    scheduler.handle(1.0, [JobResumed(JobId("s-0"), "continues past rung 1")])
    scheduler.handle(2.0, [JobFinished(JobId("s-0"), 1)])
    check_state(scheduler)
    assert scheduler.outcome(JobId("s-0")) is Phase.FINISHED
    scheduler.handle(3.0, [JobFinished(JobId("s-1"), 1)])
    assert not scheduler.jobs


def test_those_that_also_wait_for_others_take_no_place_meanwhile() -> None:
    scheduler = Scheduler(WIDE, Fifo())
    needed = JobSpec(JobId("data"), 1, 10.0)
    late = member(0, 1, after=(JobId("data"),))
    scheduler.handle(0.0, [JobSubmitted(needed), JobSubmitted(late), JobSubmitted(member(1, 1))])
    assert phases(scheduler) == "rbr"
    scheduler.handle(1.0, [JobFinished(JobId("data"), 1)])
    assert phases(scheduler) == "br", "its place is taken"
    scheduler.handle(2.0, [JobFinished(JobId("s-1"), 1)])
    assert phases(scheduler) == "r"


def test_a_balance_knows_who_is_inside() -> None:
    scheduler = submitted(4)
    again = Scheduler(WIDE, Fifo())
    again.restore(snapshot_from_json(snapshot_to_json(scheduler.state())))
    check_state(again)
    assert phases(again) == "rrbb"
    again.handle(1.0, [JobFinished(JobId("s-1"), 1)])
    assert phases(again) == "rrb"


@settings(max_examples=60)
@given(
    st.integers(1, 4), st.lists(st.tuples(st.integers(0, 9), st.sampled_from(["end", "cancel", "pause"])), max_size=30)
)
def test_at_most_so_many_hold_devices_and_all_get_their_turn(at_most: int, events: list[tuple[int, str]]) -> None:
    scheduler = submitted(10, at_most)
    for at, (number, word) in enumerate(events, start=1):
        job = scheduler.jobs.get(JobId(f"s-{number}"))
        if job is None:
            continue
        facts: dict[str, Fact] = {"cancel": JobCancelled(job.id), "pause": JobPaused(job.id)}
        facts["end"] = JobFinished(job.id, job.generation) if job.desired is not None else facts["cancel"]
        scheduler.handle(float(at), [facts[word]])
        check_state(scheduler)
        let_in = [job for job in scheduler.jobs.values() if job.phase is not Phase.BLOCKED]
        assert len(let_in) == min(at_most, len(scheduler.jobs)), "as many as may, and no more"
