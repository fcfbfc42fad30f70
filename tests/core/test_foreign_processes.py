"""Devices that others compute on: left to them while nobody of ours is there, and said so."""

from carpool.core.messages import (
    Assign,
    Fact,
    ForeignProcess,
    JobFinished,
    JobSubmitted,
    NodeJoined,
    NodeLost,
    OutsidersSeen,
)
from carpool.core.model import DeviceId, JobId, JobSpec, NodeId
from carpool.core.scheduler import Scheduler
from carpool.core.state.state_snapshot import snapshot_from_json, snapshot_to_json
from carpool.core.topology import Cluster
from carpool.policies.baselines.nonpreemptive import Fifo
from carpool.testing.rig import check_state

ADA = ForeignProcess(17, "ada", "python", 3 << 30)


def here() -> Scheduler:
    return Scheduler(Cluster.build([(1, 2, "V100")]), Fifo())


def submitted(name: str) -> JobSubmitted:
    return JobSubmitted(JobSpec(JobId(name), 1, 10.0))


def seen(device: int, *processes: ForeignProcess, keeps_free: bool = True) -> OutsidersSeen:
    return OutsidersSeen(DeviceId(device), processes, keeps_free)


def given(scheduler: Scheduler, at: float, *facts: Fact) -> dict[str, list[int]]:
    orders = scheduler.handle(at, facts)
    check_state(scheduler)
    return {order.job: [*order.allocation.devices()] for order in orders if isinstance(order, Assign)}


def test_a_device_with_others_on_it_is_not_given_away_and_why_says_so() -> None:
    scheduler = here()
    assert given(scheduler, 0.0, seen(0, ADA), submitted("a"), submitted("b")) == {"a": [1]}
    why = scheduler.why(scheduler.jobs[JobId("b")])
    assert why.endswith("n0:0 is in use by process 17 of ada (python, 3.0 GiB)"), why
    assert scheduler.snapshot().occupancy.usable_devices == {"V100": 1}
    assert given(scheduler, 1.0, seen(0)) == {"b": [0]}
    assert scheduler.outsiders == {}


def test_who_is_on_a_device_stays_and_nobody_follows() -> None:
    scheduler = here()
    given(scheduler, 0.0, submitted("a"), submitted("b"), submitted("c"))
    assert given(scheduler, 1.0, seen(0, ADA)) == {}
    assert scheduler.snapshot().occupancy.usable_devices == {"V100": 2}
    assert given(scheduler, 2.0, JobFinished(JobId("a"), 1)) == {}
    assert given(scheduler, 3.0, JobFinished(JobId("b"), 1)) == {"c": [1]}


def test_others_who_are_put_up_with_are_known_and_keep_nothing() -> None:
    scheduler = here()
    begun = given(scheduler, 0.0, seen(0, ADA, keeps_free=False), submitted("a"), submitted("b"))
    assert begun == {"a": [0], "b": [1]}
    assert scheduler.outsiders[DeviceId(0)].processes == (ADA,)


def test_they_are_in_a_balance_and_go_with_their_node() -> None:
    scheduler = here()
    given(scheduler, 0.0, seen(0, ADA), submitted("a"))
    again = here()
    again.restore(snapshot_from_json(snapshot_to_json(scheduler.state())))
    check_state(again)
    assert again.outsiders == scheduler.outsiders
    assert given(again, 1.0, submitted("b")) == {}
    assert given(again, 2.0, NodeLost(NodeId(0)), NodeJoined("n0")) == {"a": [0], "b": [1]}


def test_what_was_known_already_and_devices_that_are_not_there_do_not_count() -> None:
    scheduler = here()
    scheduler.handle(0.0, [seen(0, ADA)])
    heard: list[int] = []
    scheduler.add_observer(type("Ear", (), {"record": lambda self, record: heard.append(len(record.ignored))})())
    scheduler.handle(1.0, [seen(0, ADA), seen(9, ADA)])
    assert heard == [2]
