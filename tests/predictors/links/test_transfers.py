"""Routes over a fabric and the transfers of a step: every byte is counted, link by link."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.core.errors import InputError, UnknownName
from carpool.core.model import Kind, NodeId
from carpool.core.topology import Bank, Cluster, Link, Node
from carpool.predictors.links.fabric import NETWORK, Fabric, FabricLink
from carpool.predictors.links.layout import EXCHANGES, input_load, stage_load, stages

FABRIC = Fabric.of(Cluster.build([(2, 4, "V100"), (1, 2, "K80")]))
devices_of = st.lists(st.integers(0, 9), min_size=2, max_size=8, unique=True)


def kinds_on(fabric: Fabric, start: str, end: str) -> list[str]:
    return [fabric.wires[hop.wire].kind for hop in fabric.route(start, end)]


def test_a_cluster_has_buses_and_a_network() -> None:
    assert FABRIC.kinds == ("bus of V100", "bus of K80", NETWORK)
    assert kinds_on(FABRIC, "0", "3") == ["bus of V100"] * 2
    assert kinds_on(FABRIC, "0", "8") == ["bus of V100", NETWORK, NETWORK, "bus of K80"]
    assert FABRIC.route("5", "5") == ()
    assert FABRIC.host(9) == "n2"


def test_declared_links_are_taken() -> None:
    nodes = tuple(
        Node(NodeId(place), f"n{place}", (Bank(Kind("A"), range(2 * place, 2 * place + 2)),)) for place in range(3)
    )
    fabric = Fabric.of(Cluster(nodes, (Link(("n0", "n1"), 1e9),)))
    assert kinds_on(fabric, "0", "2") == ["bus of A", "link n0-n1", "bus of A"]
    assert NETWORK in kinds_on(fabric, "0", "4"), "a node that no link names can be reached all the same"


def test_the_route_is_the_shortest() -> None:
    fabric = Fabric(
        [FabricLink(("0", "host"), "pcie"), FabricLink(("1", "host"), "pcie"), FabricLink(("0", "1"), "nvlink")]
    )
    assert kinds_on(fabric, "0", "1") == ["nvlink"]
    with pytest.raises(InputError, match="no link leads"):
        fabric.route("0", "elsewhere")


def test_a_ring_crosses_the_network_once_each_way() -> None:
    (stage,) = stages(FABRIC, [0, 4, 1, 5], "ring")
    assert stage.repeats == 6
    crossing = [load for load in stage_load(FABRIC, stage).loads if FABRIC.wires[load.hop.wire].kind == NETWORK]
    assert [(load.flows, load.portion) for load in crossing] == [(1, 0.25)] * 4  # out and in at both nodes


def test_a_server_is_the_bottleneck() -> None:
    push, pull = stages(FABRIC, [0, 1, 2, 3], "server")
    loads = {load.hop: load for load in stage_load(FABRIC, push).loads}
    into = FABRIC.route("1", "0")[-1]
    assert (loads[into].flows, loads[into].portion) == (3, 3.0)
    assert {flow.start for flow in pull.flows} == {"0"}


@given(devices_of, st.sampled_from(sorted(EXCHANGES)))
def test_everybody_sends_and_receives_what_it_must(devices: list[int], exchange: str) -> None:
    """Added up over all stages, each device gets at least what it lacks of the sums: (n - 1)/n of the gradients."""
    num = len(devices)
    received = dict.fromkeys(map(str, devices), 0.0)
    for stage in stages(FABRIC, devices, exchange):
        for flow in stage.flows:
            assert flow.start != flow.end
            received[flow.end] += flow.portion * stage.repeats
    assert min(received.values()) >= (num - 1) / num - 1e-9
    if exchange == "ring":
        assert all(amount == pytest.approx(2 * (num - 1) / num) for amount in received.values())


@given(devices_of, st.sampled_from(sorted(EXCHANGES)))
def test_what_links_carry_is_what_flows_carry(devices: list[int], exchange: str) -> None:
    for stage in stages(FABRIC, devices, exchange):
        walked = stage_load(FABRIC, stage)
        routes = [FABRIC.route(flow.start, flow.end) for flow in stage.flows]
        carried = sum(load.portion for load in walked.loads)
        assert carried == pytest.approx(sum(f.portion * len(r) for f, r in zip(stage.flows, routes, strict=True)))
        assert len(walked.hops) == max(map(len, routes))


def test_one_device_exchanges_nothing_but_is_fed() -> None:
    assert stages(FABRIC, [3], "ring") == []
    assert [(load.flows, load.portion) for load in input_load(FABRIC, [3]).loads] == [(1, 1.0)]
    with pytest.raises(UnknownName, match="exchange"):
        stages(FABRIC, [0, 1], "rong")
