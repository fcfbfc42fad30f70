"""A drained node gets no job until it is undrained, whatever happens to it meanwhile."""

from hypothesis import given
from hypothesis import strategies as st

from carpool.core.messages import (
    Assign,
    Fact,
    JobSubmitted,
    NodeDrained,
    NodeJoined,
    NodeLost,
    NodeUndrained,
    Release,
)
from carpool.core.model import JobId, JobSpec, NodeId, Phase
from carpool.core.scheduler import Scheduler
from carpool.core.state.state_snapshot import snapshot_from_json, snapshot_to_json
from carpool.core.topology import Cluster
from carpool.policies.baselines.nonpreemptive import Fifo
from carpool.testing.rig import check_state

A = JobId("a")
CLUSTER = Cluster.build([(2, 1, "cpu")])


def test_its_jobs_are_released_and_continue_elsewhere() -> None:
    scheduler = Scheduler(CLUSTER, Fifo())
    scheduler.handle(0.0, [JobSubmitted(JobSpec(A))])
    orders = scheduler.handle(1.0, [NodeDrained(NodeId(0))])
    assert [type(order) for order in orders] == [Release, Assign]
    assert scheduler.jobs[A].crashes == 0, "it is no fault of the job"
    assert list(scheduler.jobs[A].desired.devices()) == [1]  # type: ignore[union-attr]
    assert scheduler.handle(2.0, [JobSubmitted(JobSpec(JobId("b")))]) == []
    (order,) = scheduler.handle(3.0, [NodeUndrained("n0")])
    assert order.job == "b"


events = st.lists(
    st.sampled_from([NodeDrained(NodeId(0)), NodeUndrained("n0"), NodeLost(NodeId(0)), NodeJoined("n0")]), max_size=12
)


@given(events)
def test_a_node_is_used_exactly_while_it_is_there_and_not_drained(facts: list[Fact]) -> None:
    scheduler = Scheduler(Cluster.build([(1, 1, "cpu")]), Fifo())
    scheduler.handle(0.0, [JobSubmitted(JobSpec(A))])
    is_there, is_drained = True, False
    for at, fact in enumerate(facts, start=1):
        scheduler.handle(float(at), [fact])
        is_there = type(fact) is NodeJoined or (is_there and type(fact) is not NodeLost)
        is_drained = type(fact) is NodeDrained or (is_drained and type(fact) is not NodeUndrained)
        check_state(scheduler)
        assert (scheduler.jobs[A].phase is Phase.RUNNING) == (is_there and not is_drained)
        again = Scheduler(scheduler.cluster, Fifo())
        again.restore(snapshot_from_json(snapshot_to_json(scheduler.state())))
        assert again.state() == scheduler.state()
