"""Members form one cluster; an order reaches the member that owns the devices, and a job's state goes ahead of it."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.backends.executors import ExecutorGroup, Introduction
from carpool.backends.fleet import (
    LOCAL,
    Member,
    OrderRouter,
    Routed,
    device_names,
    fleet_cluster,
    loss_of,
    member_node,
)
from carpool.core.errors import InputError
from carpool.core.messages import Assign, AssignApplied, Fact, JobFinished, NodeJoined, NodeLost, Order, Release
from carpool.core.model import Allocation, DeviceId, JobId
from carpool.core.occupancy import Occupancy
from carpool.jobs.devices import parse_devices
from carpool.jobs.program import Program
from tests.support.fake_executor import FakeExecutor

A = JobId("a")
PROGRAM = Program(entry="train.py:main")
NAMES = ("n0", "n1", "n2")


def owner(device: DeviceId) -> str:
    return f"n{device}"


def member(name: str, devices: str = "cpu:2") -> Member:
    return Member(name, tuple(parse_devices(devices, cores=[0, 1])))


def on(device: int, generation: int) -> Assign:
    return Assign(A, Allocation.of(device), generation)


def test_like_machines_are_two_nodes_of_one_cluster() -> None:
    members = [member("left"), member("right")]
    cluster = fleet_cluster(members)
    assert [node.name for node in cluster.nodes] == ["left", "right"]
    assert cluster.max_nodes == 1
    nodes = {each.name: member_node(cluster, each) for each in members}
    assert [device.id for device in nodes["right"].devices] == [2, 3]
    assert device_names(nodes) == {0: "left/cpu:0", 1: "left/cpu:1", 2: "right/cpu:0", 3: "right/cpu:1"}
    with pytest.raises(InputError):
        fleet_cluster([member("left"), member("left")])


def test_this_machine_alone_has_no_limit_of_nodes() -> None:
    assert fleet_cluster([member(LOCAL)]).max_nodes == 0


def test_a_member_keeps_its_node_and_gets_another_one_with_other_devices() -> None:
    cluster = fleet_cluster([member("a"), member("b")])
    other = member_node(cluster, member("b", "cpu:1"))
    assert other.name not in {"a", "b"}
    assert [device.id for device in other.devices] == [4]
    cluster = cluster.joined(other.name, other.banks)
    assert member_node(cluster, member("b", "cpu:1")).name == other.name, "no further node when it comes back"
    assert member_node(cluster, member("b")).name == "b"
    assert loss_of(cluster, (), "b") == [NodeLost(cluster.nodes[1].id), NodeLost(cluster.nodes[2].id)]


def test_a_new_member_takes_the_place_of_one_that_is_gone_and_has_equal_devices() -> None:
    cluster = fleet_cluster([member("a"), member("b"), member("c", "cpu:1")])
    node = member_node(cluster, member("new"), {"b", "c"})
    assert ([device.id for device in node.devices], node.replaces) == ([2, 3], "b")
    assert node.joined == NodeJoined("new", (("cpu1", 2, 0),), replaces="b")
    assert member_node(cluster, member("new", "cpu:4"), {"b", "c"}).replaces == ""
    assert member_node(cluster, member("b"), {"c"}).replaces == "", "it is known by its name"


def test_the_names_of_nodes_stay_unique_when_places_are_used_again() -> None:
    cluster = fleet_cluster([member("a"), member("b", "cpu:1"), member("c", "cpu:4")])
    for devices in ("cpu:1", "cpu:4"):
        node = member_node(cluster, member("a", devices), {"b", "c"})
        cluster = cluster.with_join(node.name, node.banks, node.supplies, node.replaces)
    names = [node.name for node in cluster.nodes]
    assert names == ["a", "a@4", "a@5"]


def test_a_member_whose_name_begins_like_another_is_not_taken_for_it() -> None:
    cluster = fleet_cluster([member("gpu"), member("gpu-2")])
    assert loss_of(cluster, (), "gpu") == [NodeLost(cluster.nodes[0].id)]
    lost = Occupancy(cluster)
    lost.lose(cluster.nodes[0])
    node = member_node(cluster, member("gpu"))
    assert node.rejoin(cluster, lost.lost, "gpu") == [NodeJoined("gpu", (("cpu1", 2, 0),))]


def test_a_job_moves_only_after_its_state() -> None:
    router = OrderRouter(NAMES, owner)
    assert router.route(on(0, 1)) == Routed({"n0": on(0, 1)})
    assert router.route(on(1, 2)) == Routed({}, ("n0",))
    assert not router.is_stale("n0", JobFinished(A, 1)), "it may end before it stops"
    assert router.route(on(2, 3)) == Routed({}), "asked once"
    assert router.on_handed_over("n0", A) == on(2, 3)
    assert router.route(on(2, 3)) == Routed({"n2": on(2, 3)})
    assert router.is_stale("n0", AssignApplied(A, 1, 0.0))


def test_a_release_during_the_handover_leaves_nothing_to_send() -> None:
    router = OrderRouter(NAMES, owner)
    router.route(on(0, 1))
    router.route(on(1, 2))
    assert router.route(Release(A, 3)) == Routed({})
    assert router.on_handed_over("n0", A) is None
    assert router.route(on(0, 4)) == Routed({"n0": on(0, 4)})


def test_a_lost_executor_hands_nothing_over() -> None:
    router = OrderRouter(NAMES, owner)
    router.route(on(0, 1))
    router.route(on(1, 2))
    assert router.on_lost("n2") == []
    assert router.on_lost("n0") == [on(1, 2)]


def test_a_release_goes_to_the_holder_or_to_all() -> None:
    router = OrderRouter(NAMES, owner)
    assert router.route(Release(A, 1)) == Routed(dict.fromkeys(NAMES, Release(A, 1)))
    router.route(on(0, 2))
    assert router.route(Release(A, 3)) == Routed({"n0": Release(A, 3)})


def test_a_job_across_nodes_is_led_by_the_holder_of_its_state() -> None:
    router = OrderRouter(NAMES, owner)
    assert router.route(on(1, 1)) == Routed({"n1": on(1, 1)})
    wide = Assign(A, Allocation.of(0, 1), 2)
    assert router.route(wide) == Routed({"n1": wide})
    assert router.route(on(1, 3)) == Routed({"n1": on(1, 3)}), "narrower again, nothing moves"
    assert router.route(Release(A, 4)) == Routed({"n1": Release(A, 4)})
    elsewhere = Assign(A, Allocation.of(0, 2), 5)
    assert router.route(elsewhere) == Routed({}, ("n1",))
    assert router.on_handed_over("n1", A) == elsewhere
    assert router.route(elsewhere) == Routed({"n0": elsewhere}), "the first device's owner"
    assert router.is_stale("n2", AssignApplied(A, 5, 0.0)), "a peer reports nothing"


moves = st.lists(
    st.one_of(
        st.tuples(st.just("assign"), st.integers(0, 2)),
        st.tuples(st.just("span"), st.integers(0, 2)),
        st.tuples(st.just("release"), st.just(0)),
        st.tuples(st.just("handed over"), st.integers(0, 2)),
        st.tuples(st.just("lost"), st.integers(0, 2)),
    ),
    max_size=25,
)


@given(moves)
def test_never_do_two_executors_run_a_job(events: list[tuple[str, int]]) -> None:
    router = OrderRouter(NAMES, owner)
    running: set[str] = set()
    newest: Order | None = None
    for generation, (what, number) in enumerate(events, start=1):
        sent = Routed({})
        freed: list[Assign] = []
        if what == "assign":
            newest = on(number, generation)
            sent = router.route(newest)
        elif what == "span":
            newest = Assign(A, Allocation.of(*({0, 1, 2} - {number})), generation)
            sent = router.route(newest)
        elif what == "release":
            newest = Release(A, generation)
            sent = router.route(newest)
            running -= sent.orders.keys()
        elif what == "handed over" and f"n{number}" in router._leaving.get(A, ()):
            running.discard(f"n{number}")
            freed = [order for order in [router.on_handed_over(f"n{number}", A)] if order is not None]
        elif what == "lost":
            running.discard(f"n{number}")
            freed = router.on_lost(f"n{number}")
        for order in freed:
            assert order is newest, "an outdated order is never sent"
            sent = router.route(order)
        running |= {name for name, order in sent.orders.items() if isinstance(order, Assign)}
        assert len(running) <= 1


def test_a_group_introduces_a_moved_job_to_resume() -> None:
    machines = {name: FakeExecutor({"a": 5}) for name in ("n0", "n1")}
    group = ExecutorGroup(machines, owner)
    group.introduce(A, Introduction(PROGRAM, resume=False))
    assert not machines["n0"].introduced, "the first order decides who learns of it"
    group.carry([on(0, 1)], {A: Introduction(PROGRAM, resume=False)})
    group.carry([on(1, 2)], {A: Introduction(PROGRAM, resume=True)})
    assert (machines["n0"].handed_over, machines["n1"].orders) == ([A], [])
    facts: list[Fact] = [AssignApplied(A, 2, 0.0), NodeJoined("n9")]
    group.handed_over("n0", A)
    assert (machines["n1"].introduced, machines["n1"].orders) == ({A: True}, [on(1, 2)])
    assert group.current("n0", facts) == (NodeJoined("n9"),)
    assert group.current("n1", facts) == tuple(facts)
    group.forget(A)
    assert (machines["n0"].forgotten, machines["n1"].forgotten) == ([], [A])


def test_an_executor_that_is_replaced_frees_the_orders_that_waited_for_it() -> None:
    machines = {name: FakeExecutor({"a": 5}) for name in ("n0", "n1")}
    group = ExecutorGroup(machines, owner)
    group.carry([on(0, 1)], {A: Introduction(PROGRAM, resume=False)})
    group.carry([on(1, 2)], {A: Introduction(PROGRAM, resume=True)})
    group.replace("n0", FakeExecutor({}))
    assert machines["n1"].introduced == {A: True}


def test_a_claimed_executor_keeps_its_jobs() -> None:
    machines = {name: FakeExecutor({"a": 5}) for name in ("n0", "n1")}
    group = ExecutorGroup(machines, owner)
    group.adopt("n0", [A])
    machines["n0"].introduced[A] = True
    group.carry([on(0, 2)], {A: Introduction(replace(PROGRAM, seed=1), resume=True)})
    assert (machines["n0"].orders, machines["n0"].handed_over) == ([on(0, 2)], [])
