"""Every transfer of a training step, walked over the links: which link carries how much of the gradients, when."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from carpool.core.errors import UnknownName
from carpool.predictors.fabric import Fabric, Hop


class GradientFlow(NamedTuple):
    """Data on their way from one end to another: a portion of all gradients."""

    start: str
    end: str
    portion: float


class Stage(NamedTuple):
    """Flows that go on at the same time, so many times over; the next stage begins when all have arrived."""

    flows: tuple[GradientFlow, ...]
    repeats: int = 1


class LinkLoad(NamedTuple):
    """What a stage puts on one link in one direction: flows at once, and the portion of the gradients in them."""

    hop: Hop
    flows: int
    portion: float


@dataclass(frozen=True, slots=True)
class Walked:
    """A stage as the links see it."""

    loads: tuple[LinkLoad, ...]
    hops: tuple[Hop, ...]  # of its longest route: each costs a latency
    repeats: int


Exchange = Callable[[Fabric, Sequence[int]], list[Stage]]


def ring(fabric: Fabric, devices: Sequence[int]) -> list[Stage]:
    """All-reduce around a ring, neighbours next to each other: 2(n − 1) rounds of a n-th of the gradients each.

    Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 2009.
    """
    order = fabric.in_order(devices)
    num = len(order)
    flows = [GradientFlow(str(one), str(order[(place + 1) % num]), 1.0 / num) for place, one in enumerate(order)]
    return [Stage(tuple(flows), 2 * (num - 1))]


def tree(fabric: Fabric, devices: Sequence[int]) -> list[Stage]:
    """All-reduce up and down a binary tree over neighbours: each level carries all gradients, up, then down."""
    order = fabric.in_order(devices)
    levels: list[tuple[GradientFlow, ...]] = []
    reach = 1
    while reach < len(order):
        pairs = range(0, len(order) - reach, 2 * reach)
        levels.append(tuple([GradientFlow(str(order[place + reach]), str(order[place]), 1.0) for place in pairs]))
        reach *= 2
    down = [tuple([GradientFlow(flow.end, flow.start, flow.portion) for flow in level]) for level in reversed(levels)]
    return [Stage(level) for level in (*levels, *down)]


def server(fabric: Fabric, devices: Sequence[int]) -> list[Stage]:
    """A parameter server on the first device: all others send it all gradients, then fetch all parameters."""
    first, *others = fabric.in_order(devices)
    push = tuple([GradientFlow(str(device), str(first), 1.0) for device in others])
    return [Stage(push), Stage(tuple([GradientFlow(flow.end, flow.start, flow.portion) for flow in push]))]


def scatter(fabric: Fabric, devices: Sequence[int]) -> list[Stage]:
    """Each device adds up and updates a n-th of the parameters: every pair exchanges a n-th, twice."""
    num = len(devices)
    pairs = tuple(
        [GradientFlow(str(one), str(other), 1.0 / num) for one in devices for other in devices if one != other]
    )
    return [Stage(pairs, 2)]


EXCHANGES: dict[str, Exchange] = {"ring": ring, "tree": tree, "server": server, "scatter": scatter}


def stages(fabric: Fabric, devices: Sequence[int], exchange: str) -> list[Stage]:
    """The transfers that synchronise devices after a step; none for one device."""
    if exchange not in EXCHANGES:
        raise UnknownName("exchange", exchange, EXCHANGES)
    return EXCHANGES[exchange](fabric, devices) if len(devices) > 1 else []


def walk(fabric: Fabric, stage: Stage) -> Walked:
    """Follow every flow of a stage, link by link."""
    flows: dict[Hop, int] = {}
    portions: dict[Hop, float] = {}
    longest: tuple[Hop, ...] = ()
    for flow in stage.flows:
        route = fabric.route(flow.start, flow.end)
        longest = max(longest, route, key=len)
        for hop in route:
            flows[hop] = flows.get(hop, 0) + 1
            portions[hop] = portions.get(hop, 0.0) + flow.portion
    return Walked(tuple([LinkLoad(hop, flows[hop], portions[hop]) for hop in flows]), longest, stage.repeats)


def fed(fabric: Fabric, devices: Sequence[int]) -> Walked:
    """The input of a step on its way from the hosts to the devices, an equal portion for each."""
    portion = 1.0 / len(devices)
    flows = tuple([GradientFlow(fabric.host(device), str(device), portion) for device in devices])
    return walk(fabric, Stage(flows))
