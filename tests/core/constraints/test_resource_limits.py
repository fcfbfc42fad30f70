"""Policies plan within supplies that they know nothing of."""

from dataclasses import dataclass, replace

import pytest

from carpool.core.draft import Draft
from carpool.core.errors import OutOfHostResources
from carpool.core.host_resources import HostResources
from carpool.core.messages import Assign, Change, JobFinished, JobSubmitted, NodeJoined, NodeLost
from carpool.core.model import Allocation, JobId, JobSpec, NodeId
from carpool.core.policy import Plan, Policy, Snapshot
from carpool.core.scheduler import Scheduler
from carpool.core.topology import Cluster
from carpool.policies.baselines.nonpreemptive import Fifo
from carpool.testing.rig import check_state

GIB = 1 << 30


def cluster(num_nodes: int = 1, size: int = 4, *, cpus: int = 8, ram_bytes: int = 0) -> Cluster:
    plain = Cluster.build([(num_nodes, size, "V100")])
    return Cluster(tuple(replace(node, resources=HostResources(cpus, ram_bytes)) for node in plain.nodes))


def spec(name: str, devices: int = 1, *, cpus: int = 0, most: int = 0) -> JobSpec:
    return JobSpec(JobId(name), devices, 10.0, cpus=cpus, min_devices=1 if most else 0, max_devices=most)


def given(scheduler: Scheduler, at: float, *facts: object) -> dict[str, tuple[int, ...]]:
    """What the orders give to whom; the books are checked after them."""
    orders = scheduler.handle(at, facts)  # type: ignore[arg-type]
    check_state(scheduler)
    return {order.job: tuple(order.allocation.devices()) for order in orders if isinstance(order, Assign)}


@dataclass(frozen=True, slots=True)
class Stubborn(Policy):
    """Gives every job in the queue as many devices as it can use, the lowest first, and drafts nothing."""

    drafts: bool = True

    def plan(self, view: Snapshot) -> Plan:
        draft = Draft(view)
        taken = sum(1 for device in range(view.cluster.num_devices) if view.occupancy.residents(device))
        changes = []
        for name in view.waiting:
            job = view.jobs[name]
            devices = range(taken, min(taken + job.spec.widest, view.cluster.num_devices))
            if len(devices) < job.spec.narrowest:
                continue
            allocation = Allocation.exclusive((devices,))
            taken = devices.stop
            if self.drafts:
                draft.assign(job, allocation)
            changes.append(Change(name, allocation))
        return draft.finish("as many as each can use") if self.drafts else Plan(tuple(changes), "as many as it can use")


def test_a_job_waits_for_cores_and_starts_when_they_are_free() -> None:
    scheduler = Scheduler(cluster(), Fifo())
    begun = given(scheduler, 0.0, *(JobSubmitted(spec(name, cpus=6)) for name in "ab"))
    assert begun == {"a": (0,)}
    assert scheduler.why(scheduler.jobs[JobId("b")]).endswith("node n0 has 2 of 8 cores left, 6 needed")
    assert "cores" not in scheduler.why(scheduler.jobs[JobId("a")])
    assert given(scheduler, 1.0, JobFinished(JobId("a"), 1)) == {"b": (0,)}


def test_the_head_of_a_queue_blocks_for_supplies_as_it_does_for_devices() -> None:
    strict, lax = Scheduler(cluster(), Fifo()), Scheduler(cluster(), Fifo(bypass=True))
    jobs = [JobSubmitted(spec("a", cpus=6)), JobSubmitted(spec("b", cpus=6)), JobSubmitted(spec("c"))]
    assert given(strict, 0.0, *jobs) == {"a": (0,)}
    assert given(lax, 0.0, *jobs) == {"a": (0,), "c": (1,)}


def test_nodes_that_have_the_supplies_are_preferred() -> None:
    scheduler = Scheduler(cluster(2), Fifo())
    given(scheduler, 0.0, JobSubmitted(spec("a", cpus=6)))
    assert given(scheduler, 1.0, JobSubmitted(spec("b", cpus=6))) == {"b": (4,)}


@pytest.mark.parametrize("drafts", [True, False])
def test_a_policy_that_chooses_devices_itself_is_asked_again(drafts: bool) -> None:
    scheduler = Scheduler(cluster(), Stubborn(drafts))
    begun = given(scheduler, 0.0, *(JobSubmitted(spec(name, cpus=4)) for name in "abcd"), JobSubmitted(spec("e")))
    assert begun == {"a": (0,), "b": (1,), "e": (2,)}
    assert [*scheduler.snapshot().waiting] == ["c", "d"], "they are in the queue again"


def test_an_elastic_job_gets_no_more_devices_than_there_are_supplies_for() -> None:
    scheduler = Scheduler(cluster(), Stubborn())
    assert given(scheduler, 0.0, JobSubmitted(spec("wide", cpus=3, most=4))) == {"wide": (0, 1)}
    assert scheduler.jobs[JobId("wide")].spec.widest == 4, "what was asked stays"


def test_a_draft_says_what_is_short_and_stays_as_it_was() -> None:
    scheduler = Scheduler(cluster(), Stubborn())
    given(scheduler, 0.0, JobSubmitted(spec("a", cpus=8)), JobSubmitted(spec("b", cpus=1)))
    draft = Draft(scheduler.snapshot())
    with pytest.raises(OutOfHostResources, match=r"node 'n0' has 0 of 8 cores left, 1 needed for job 'b'"):
        draft.assign(scheduler.jobs[JobId("b")], Allocation.of(3))
    assert not draft.changes
    assert draft.num_free == 3


def test_a_node_may_come_back_with_other_supplies() -> None:
    scheduler = Scheduler(cluster(), Fifo())
    given(scheduler, 0.0, JobSubmitted(spec("a", cpus=6)), JobSubmitted(spec("b", cpus=6)))
    begun = given(scheduler, 1.0, NodeLost(NodeId(0)), NodeJoined("n0", (), (12, 0, 0)))
    assert begun == {"a": (0,), "b": (1,)}
    assert scheduler.cluster.nodes[0].resources == HostResources(12)
