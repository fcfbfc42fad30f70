"""Reasons of jobs: what a job waits for or holds, since when and what changes it, under every policy."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.core.messages import (
    AssignApplied,
    JobCrashed,
    JobPaused,
    JobSubmitted,
    NodeDrained,
    NodeLost,
    ReleaseApplied,
)
from carpool.core.model import Job, JobId, JobSpec, Kind, NodeId, Phase
from carpool.core.policy import Policy, Snapshot
from carpool.core.scheduler import Scheduler
from carpool.core.topology import Cluster
from carpool.policies.baselines.nonpreemptive import Fifo
from carpool.policies.market.policy import Carpool, Elastic
from carpool.policies.registry import parse_policy

ONE = Cluster.build([(1, 1, "V100")])
FOUR = Cluster.build([(1, 4, "V100")])


def spec(name: str, work: float | None = 5.0, **keys: object) -> JobSpec:
    return replace(JobSpec(JobId(name), 1, work), **keys)  # type: ignore[arg-type]


def submit(scheduler: Scheduler, at: float, *specs: JobSpec) -> Scheduler:
    orders = scheduler.handle(at, [JobSubmitted(each) for each in specs])
    for order in orders:
        held = hasattr(order, "allocation")
        fact = AssignApplied if held else ReleaseApplied
        scheduler.handle(at, [fact(order.job, order.generation, scheduler.jobs[order.job].done)])
    return scheduler


def queue(*specs: JobSpec, cluster: Cluster = ONE, policy: Policy | None = None) -> Scheduler:
    return submit(Scheduler(cluster, policy or Fifo()), 0.0, *specs)


def why(scheduler: Scheduler, name: str, *, verbose: bool = False) -> str:
    return scheduler.why(scheduler.jobs[JobId(name)], verbose=verbose)


@pytest.mark.parametrize("policy", [Fifo(), Elastic(), Carpool(together=1), parse_policy("srtf")])
def test_a_waiting_job_names_the_job_before_it_its_end_and_the_device(policy: Policy) -> None:
    scheduler = queue(spec("s8", 40.0), spec("next", 45.0), policy=policy)
    assert "waits behind s8 (finishes in about 40 s), then gets n0:0" in why(scheduler, "next")


def test_devices_have_the_names_of_the_caller() -> None:
    scheduler = queue(spec("s8", 40.0), spec("next"))
    assert "then gets cuda:0" in scheduler.why(scheduler.jobs[JobId("next")], {0: "cuda:0"})


def test_jobs_ahead_are_named_with_what_puts_them_there() -> None:
    scheduler = queue(spec("s8", 40.0))
    submit(scheduler, 0.0, spec("early", 10.0), spec("late", 10.0), spec("boss", 10.0, priority=1))
    told = why(scheduler, "late")
    assert "2 waiting jobs are ahead of it: boss (priority high), early" in told
    assert "waits behind early (ahead of it in the queue), then gets n0:0 in about 60 s" in told
    assert "a higher priority or weight" in told
    submit(scheduler, 0.0, spec("least", 10.0, priority=-1))
    told = why(scheduler, "least")
    assert (
        "3 waiting jobs are ahead of it: boss (priority high), early (priority normal), late (priority normal)" in told
    )


def test_an_unknown_end_is_not_invented() -> None:
    told = why(queue(spec("endless", None), spec("next")), "next")
    assert "about" not in told
    assert "waits behind endless (time left unknown)" in told


def test_an_assumed_length_is_not_told_as_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = queue(spec("first", 40.0), spec("next"))
    monkeypatch.setattr(type(scheduler.snapshot().estimates), "knows_length", lambda self, job: False)
    assert "waits behind first (time left unknown)" in why(scheduler, "next")
    assert "holds n0:0; time left unknown" in why(scheduler, "first")


def test_a_job_that_needs_more_than_is_free_names_the_number() -> None:
    scheduler = queue(spec("a", 40.0, devices=3), spec("wide", devices=4), cluster=FOUR)
    assert "1 of the 4 devices it needs is free: with fewer it could start now" in why(scheduler, "wide")


def test_a_blocked_job_names_what_blocks_it_and_when_that_ends() -> None:
    scheduler = queue(spec("first", 40.0), spec("then", after=(JobId("first"),)))
    assert "is blocked until first (running, finishes in about 40 s)" in why(scheduler, "then")
    scheduler.handle(1.0, [JobPaused(JobId("first"))])
    assert "first (paused: carpool resume first)" in why(scheduler, "then")


def test_a_job_over_the_limit_of_its_array_names_the_jobs_that_use_it() -> None:
    jobs = [spec(f"s-{number}", 40.0, array="s", at_most=1) for number in range(2)]
    told = why(queue(*jobs), "s-1")
    assert "at most 1 jobs of s" in told
    assert "s-0 finishes first, in about 40 s" in told


def test_a_preempted_job_names_the_job_that_started_then() -> None:
    scheduler = queue(spec("long", 1000.0), policy=parse_policy("srtf"))
    submit(scheduler, 10.0, spec("short", 5.0))
    scheduler.handle(12.0, [])
    told = why(scheduler, "long")
    assert told.startswith("was preempted 2 s ago when short started; waits behind short")


def test_a_crashed_job_says_so() -> None:
    scheduler = submit(queue(spec("a"), policy=parse_policy("sjf")), 0.0, spec("b", 1.0))
    job = scheduler.jobs[JobId("a")]
    scheduler.handle(1.0, [JobCrashed(job.id, job.generation, 0.0, "CUDA error 700")])
    assert "crashed: CUDA error 700" in why(scheduler, "a")


def test_a_shrunk_job_names_its_width_before_and_the_job_that_started_then() -> None:
    scheduler = queue(spec("a", 1000.0, min_devices=1, max_devices=4), cluster=FOUR, policy=Elastic())
    submit(scheduler, 10.0, spec("b", 10.0, devices=2))
    told = why(scheduler, "a")
    assert "shrunk from 4 devices 0 s ago when b started; 2 of at most 4 devices" in told


def test_devices_that_are_out_of_use_are_named() -> None:
    cluster = Cluster.build([(2, 1, "V100")])
    scheduler = queue(spec("two", devices=2), cluster=cluster)
    scheduler.handle(1.0, [NodeLost(NodeId(1))])
    told = why(scheduler, "two")
    assert "needs 2 devices, and 1 can be used" in told
    assert "node n1 is lost" in told
    assert "min_devices = 1" in told
    scheduler.handle(2.0, [NodeDrained(NodeId(0))])
    assert "node n0 is drained (carpool undrain n0)" in why(scheduler, "two")


def limited(*nodes: tuple[int, int, str], max_nodes: int) -> Cluster:
    return replace(Cluster.build(nodes), max_nodes=max_nodes)


def test_a_job_on_one_node_waits_for_devices_of_one_node() -> None:
    cluster = limited((3, 2, "V100"), max_nodes=1)
    held = [spec("a", 40.0), spec("b", 90.0), spec("c", 70.0, devices=2)]
    scheduler = queue(*held, spec("wide", devices=2), cluster=cluster, policy=parse_policy("fifo:placement=emptiest"))
    nodes = {name: cluster.node_of(next(iter(job.desired.devices()))).name
             for name, job in scheduler.jobs.items() if job.desired is not None}  # fmt: skip
    assert len(set(nodes.values())) == 3
    told = why(scheduler, "wide")
    assert "waits behind a (finishes in about 40 s)" in told
    assert f"then gets {nodes[JobId('a')]}:0 and {nodes[JobId('a')]}:1" in told


def test_free_devices_of_the_types_of_a_job_on_too_many_nodes_are_named() -> None:
    banks = [(Kind("V100"), 1, 0), (Kind("K80"), 4, 0)]
    cluster = Cluster((), max_nodes=1).joined("left", banks).joined("right", banks)
    scheduler = queue(spec("wide", devices=2, kinds=(Kind("V100"),)), cluster=cluster)
    assert "2 devices are free, but on several nodes" in why(scheduler, "wide")


def test_a_paused_job_says_how_to_resume_it() -> None:
    scheduler = queue(spec("a"))
    scheduler.handle(1.0, [JobPaused(JobId("a"))])
    assert "carpool resume a" in why(scheduler, "a")


def test_a_job_that_its_user_did_not_pause_says_why_it_is_paused() -> None:
    scheduler = queue(spec("a"))
    scheduler.handle(1.0, [JobPaused(JobId("a"), "was paused: the executor died")])
    words = why(scheduler, "a")
    assert "the executor died" in words
    assert "carpool resume a" in words


@pytest.mark.parametrize("policy", [Carpool(), Elastic()])
def test_prices_are_shown_only_on_request(policy: Policy) -> None:
    scheduler = queue(spec("a", 40.0), spec("b", 90.0), policy=policy)
    for name in ("a", "b"):
        assert "s per second" not in why(scheduler, name)
        assert "s per second" in why(scheduler, name, verbose=True)


class Talkative(Fifo):
    """A policy with an explanation of its own."""

    def why(self, view: Snapshot, job: Job) -> str:
        return "since I like it"


def test_a_policys_own_words_are_added() -> None:
    assert why(queue(spec("a"), policy=Talkative()), "a").endswith("; since I like it")


_SPECS = st.builds(
    lambda devices, work, priority, keys: {"devices": devices, "work": work, "priority": priority, **keys},
    st.integers(1, 4),
    st.none() | st.floats(0.1, 1e6),
    st.integers(-1, 2),
    st.sampled_from([{}, {"min_devices": 1, "max_devices": 4}, {"deadline_s": 30.0}, {"array": "s", "at_most": 1}]),
)


@given(st.lists(_SPECS, min_size=1, max_size=6), st.sampled_from(["carpool", "elastic", "fifo", "srtf", "multifactor"]))
def test_every_job_has_a_reason_under_every_policy(drawn: list[dict[str, object]], policy: str) -> None:
    named = [spec(f"j{number}", **keys) for number, keys in enumerate(drawn)]  # type: ignore[arg-type]
    scheduler = queue(*named, cluster=FOUR, policy=parse_policy(policy))
    scheduler.handle(1.0, [NodeLost(NodeId(0))] if len(drawn) % 2 else [])
    for job in scheduler.jobs.values():
        told = scheduler.why(job, verbose=True)
        assert told
        assert job.phase is not Phase.WAITING or "waits" in told or "cannot start" in told
