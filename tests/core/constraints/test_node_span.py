"""Where a job may use one node only, no policy places it on two, and the reason is given."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.core.errors import InputError, SpansNodes
from carpool.core.journal import Header, header_from_json, header_to_json
from carpool.core.messages import Assign, Fact, JobFinished, JobSubmitted, NodeJoined, Woke
from carpool.core.model import Allocation, JobId, JobSpec, Kind
from carpool.core.occupancy import Occupancy
from carpool.core.placement import PLACEMENT_RULES, place
from carpool.core.policy import Plan, Policy, Snapshot
from carpool.core.scheduler import Scheduler
from carpool.core.topology import Cluster
from carpool.jobs.feasibility import check_fit
from carpool.jobs.job_file import ListedJob
from carpool.jobs.program import Program
from carpool.policies.baselines.nonpreemptive import Fifo
from carpool.policies.registry import POLICIES, parse_policy
from carpool.testing.rig import check_state

CPU = Kind("cpu")


def fleet(*sizes: int) -> Cluster:
    return replace(Cluster.build([(1, size, "cpu") for size in sizes]), max_nodes=1)


def job(name: str, devices: int = 1, most: int = 0) -> JobSpec:
    return JobSpec(JobId(name), devices, 10.0, min_devices=1 if most else 0, max_devices=most)


def nodes_of(cluster: Cluster, allocation: Allocation) -> set[str]:
    return {cluster.node_of(device).name for device in allocation.devices()}


@pytest.mark.parametrize("rule", PLACEMENT_RULES.values(), ids=PLACEMENT_RULES)
@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4), data=st.data())
def test_every_rule_keeps_to_one_node(rule: object, sizes: list[int], data: st.DataObject) -> None:
    cluster = fleet(*sizes)
    occupancy = Occupancy(cluster)
    for device in data.draw(st.sets(st.integers(0, cluster.num_devices - 1))):
        occupancy.take(JobSpec(JobId(f"t{device}")), Allocation.of(device))
    count = data.draw(st.integers(1, 5))
    runs = place(occupancy, [CPU], count, rule)  # type: ignore[arg-type]
    fits = any(occupancy.free_mask(node.id).bit_count() >= count for node in cluster.nodes)
    assert (runs is not None) == fits
    if runs is not None:
        assert sum(map(len, runs)) == count
        assert len(nodes_of(cluster, Allocation.exclusive(runs))) == 1


def test_an_allocation_on_two_nodes_is_refused() -> None:
    with pytest.raises(SpansNodes):
        Occupancy(fleet(1, 1)).take(job("a", 2), Allocation.of(0, 1))
    Occupancy(replace(fleet(1, 1), max_nodes=2)).take(job("a", 2), Allocation.of(0, 1))


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_job_that_may_use_two_nodes_gets_them_beside_one_that_may_not(policy: str) -> None:
    scheduler = Scheduler(fleet(1, 1), parse_policy("allox:gang=true" if policy == "allox" else policy))
    wide = replace(job("wide", 2), max_nodes=2)
    orders = scheduler.handle(0.0, [JobSubmitted(wide), JobSubmitted(job("never", 2))])
    for _ in range(20):
        if orders:
            break
        orders = scheduler.handle(scheduler.wake_at or 1.0, [Woke()])
    (order,) = orders
    assert isinstance(order, Assign)
    assert (order.job, nodes_of(scheduler.cluster, order.allocation)) == ("wide", {"n0", "n1"})


def test_one_node_is_preferred() -> None:
    scheduler = Scheduler(fleet(1, 2, 1), Fifo())
    (order,) = scheduler.handle(0.0, [JobSubmitted(replace(job("wide", 2), max_nodes=3))])
    assert isinstance(order, Assign)
    assert nodes_of(scheduler.cluster, order.allocation) == {"n1"}


def test_the_limit_survives_a_join_and_the_journal() -> None:
    cluster = fleet(1, 1).joined("c", [("cpu", 2, 0)])
    assert cluster.max_nodes == 1
    assert header_from_json(header_to_json(Header("1", "fifo", cluster))).cluster == cluster


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_no_policy_places_a_job_on_two_nodes(policy: str) -> None:
    scheduler = Scheduler(fleet(2, 3, 1), parse_policy("allox:gang=true" if policy == "allox" else policy))
    facts: list[Fact] = [JobSubmitted(job(f"j{n}", 1 + n % 3, 6 if n % 2 else 0)) for n in range(8)]
    facts.append(NodeJoined("late", (("cpu", 2, 0),)))
    held: dict[JobId, int] = {}
    at = 0.0
    for _ in range(60):
        for order in scheduler.handle(at, facts):
            held.pop(order.job, None)
            if isinstance(order, Assign):
                assert len(nodes_of(scheduler.cluster, order.allocation)) == 1
                held[order.job] = order.generation
        check_state(scheduler)
        if not scheduler.jobs:
            return
        finished = list(held.items())[:1]
        facts = [JobFinished(name, held.pop(name)) for name, _ in finished] or [Woke()]
        at = max(at + 1.0, 0.0 if finished else scheduler.wake_at or 0.0)
    pytest.fail(f"still there: {list(scheduler.jobs)}")


class Counted(Policy):
    """Counts the plans of another policy, also of those that are refused."""

    def __init__(self, policy: Policy) -> None:
        self.inner = policy
        self.plans = 0
        self.shares_devices = policy.shares_devices  # type: ignore[misc]  # of this one, not of the class
        self.max_virtual = policy.max_virtual  # type: ignore[misc]

    def plan(self, view: Snapshot) -> Plan:
        self.plans += 1
        return self.inner.plan(view)


@pytest.mark.parametrize("policy", ["carpool", "elastic"])
def test_the_default_policy_chooses_fewer_devices_rather_than_too_many_nodes(policy: str) -> None:
    counted = Counted(parse_policy(policy))
    scheduler = Scheduler(fleet(3, 3), counted)
    scheduler.handle(0.0, [JobSubmitted(job(f"gang-{n}", 2)) for n in range(2)])
    counted.plans = 0
    (order,) = scheduler.handle(1.0, [JobSubmitted(job("elastic", 1, 3))])
    assert isinstance(order, Assign)
    assert order.allocation.num_devices == 1, "one device is free on each node"
    assert counted.plans == 1, "a refused plan costs another one"


@pytest.mark.parametrize("policy", ["carpool", "elastic"])
def test_a_job_without_a_node_for_it_keeps_no_device_from_another(policy: str) -> None:
    scheduler = Scheduler(fleet(1, 1, 1, 1), parse_policy(policy))
    scheduler.handle(0.0, [JobSubmitted(job("fits")), *(JobSubmitted(job(f"wide-{n}", 2)) for n in range(6))])
    assert scheduler.jobs[JobId("fits")].desired is not None


def test_the_reason_names_the_limit() -> None:
    scheduler = Scheduler(fleet(2, 2), Fifo())
    scheduler.handle(0.0, [JobSubmitted(job("a")), JobSubmitted(job("b", 2))])
    scheduler.handle(1.0, [JobSubmitted(job("c", 2))])
    assert "one node" not in scheduler.why(scheduler.jobs[JobId("a")])
    assert "one node" not in scheduler.why(scheduler.jobs[JobId("c")]), "one device is free: too few anywhere"
    scheduler = Scheduler(fleet(1, 1), Fifo())
    scheduler.handle(0.0, [JobSubmitted(job("c", 2))])
    assert "one node" in scheduler.why(scheduler.jobs[JobId("c")])


def test_a_job_larger_than_every_node_is_refused_with_the_reason() -> None:
    with pytest.raises(InputError, match="one node"):
        check_fit([ListedJob(job("a", 3), Program(entry="a:b"))], fleet(2, 2))
    assert check_fit([ListedJob(job("a", 1, 4), Program(entry="a:b"))], fleet(2, 2))
