"""AllocationHistory: spans from plans, ends, and lost nodes."""

from carpool.core.messages import Assign, JobFinished, JobSubmitted, NodeJoined, NodeLost
from carpool.core.model import JobId, JobSpec, NodeId
from carpool.core.scheduler import Scheduler
from carpool.core.topology import Cluster
from carpool.policies.baselines.nonpreemptive import Fifo
from carpool.service.queries.allocation_history import AllocationHistory, AllocationSpan

CLUSTER = Cluster.build([(1, 2, "cpu")])
A, B = JobId("a"), JobId("b")


def test_spans_begin_with_a_plan_and_end_with_the_job_or_its_node() -> None:
    spans = AllocationHistory(CLUSTER)
    scheduler = Scheduler(CLUSTER, Fifo(), observers=(spans,))
    [first] = scheduler.handle(1.0, [JobSubmitted(JobSpec(A, devices=2))])
    assert isinstance(first, Assign)
    assert list(spans.between(0.0, 9.0)) == [AllocationSpan(0, A, 1.0, 1.0), AllocationSpan(1, A, 1.0, 1.0)]
    scheduler.handle(2.0, [JobSubmitted(JobSpec(B))])
    scheduler.handle(5.0, [JobFinished(A, first.generation)])
    scheduler.handle(7.0, [NodeLost(NodeId(0))])
    over = [
        AllocationSpan(0, A, 1.0, 1.0, 5.0),
        AllocationSpan(1, A, 1.0, 1.0, 5.0),
        AllocationSpan(0, B, 1.0, 5.0, 7.0),
    ]
    assert list(spans.between(0.0, 9.0)) == over
    assert list(spans.between(6.0, 9.0)) == over[2:]
    assert list(spans.between(0.0, 0.5)) == []
    scheduler.handle(8.0, [NodeJoined(CLUSTER.nodes[0].name)])
    assert list(spans.between(7.5, 9.0)) == [AllocationSpan(0, B, 1.0, 8.0)]


def test_only_the_newest_closed_spans_are_kept() -> None:
    spans = AllocationHistory(CLUSTER, max_closed=1)
    scheduler = Scheduler(CLUSTER, Fifo(), observers=(spans,))
    for at, name in ((0.0, A), (2.0, B)):
        [order] = scheduler.handle(at, [JobSubmitted(JobSpec(name))])
        scheduler.handle(at + 1.0, [JobFinished(name, order.generation)])
    assert list(spans.between(0.0, 9.0)) == [AllocationSpan(0, B, 1.0, 2.0, 3.0)]
