"""Transfers of a training step routed over links, and groups of trainings as flat arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from carpool.core.errors import UnknownName
from carpool.predictors.links.fabric import Fabric, Hop


class GradientFlow(NamedTuple):
    """Data from one end to another: a portion of all gradients."""

    start: str
    end: str
    portion: float


class Stage(NamedTuple):
    """Concurrent flows, repeated; the next stage starts when all have arrived."""

    flows: tuple[GradientFlow, ...]
    repeats: int = 1


class LinkLoad(NamedTuple):
    """Load of a stage on one link in one direction: concurrent flows, and their portion of the gradients."""

    hop: Hop
    flows: int
    portion: float


@dataclass(frozen=True, slots=True)
class StageLoad:
    """A stage as link loads."""

    loads: tuple[LinkLoad, ...]
    hops: tuple[Hop, ...]  # of its longest route: each costs a latency
    repeats: int


ParamExchange = Callable[[Fabric, Sequence[int]], list[Stage]]


def ring(fabric: Fabric, devices: Sequence[int]) -> list[Stage]:
    """Ring all-reduce over neighbours: 2(n − 1) rounds of an n-th of the gradients each.

    Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 2009.
    """
    order = fabric.in_order(devices)
    num = len(order)
    flows = [GradientFlow(str(one), str(order[(place + 1) % num]), 1.0 / num) for place, one in enumerate(order)]
    return [Stage(tuple(flows), 2 * (num - 1))]


def tree(fabric: Fabric, devices: Sequence[int]) -> list[Stage]:
    """Binary-tree all-reduce over neighbours: each level carries all gradients, up, then down."""
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
    """Parameter server on the first device: all others send all gradients, then fetch all parameters."""
    first, *others = fabric.in_order(devices)
    push = tuple([GradientFlow(str(device), str(first), 1.0) for device in others])
    return [Stage(push), Stage(tuple([GradientFlow(flow.end, flow.start, flow.portion) for flow in push]))]


def scatter(fabric: Fabric, devices: Sequence[int]) -> list[Stage]:
    """Each device reduces and updates an n-th of the parameters: every pair exchanges an n-th, twice."""
    num = len(devices)
    pairs = tuple(
        [GradientFlow(str(one), str(other), 1.0 / num) for one in devices for other in devices if one != other]
    )
    return [Stage(pairs, 2)]


EXCHANGES: dict[str, ParamExchange] = {"ring": ring, "tree": tree, "server": server, "scatter": scatter}


def stages(fabric: Fabric, devices: Sequence[int], exchange: str) -> list[Stage]:
    """The transfers that synchronize devices after a step; none for one device."""
    if exchange not in EXCHANGES:
        raise UnknownName("exchange", exchange, EXCHANGES)
    return EXCHANGES[exchange](fabric, devices) if len(devices) > 1 else []


def stage_load(fabric: Fabric, stage: Stage) -> StageLoad:
    """Route every flow of a stage link by link."""
    flows: dict[Hop, int] = {}
    portions: dict[Hop, float] = {}
    longest: tuple[Hop, ...] = ()
    for flow in stage.flows:
        route = fabric.route(flow.start, flow.end)
        longest = max(longest, route, key=len)
        for hop in route:
            flows[hop] = flows.get(hop, 0) + 1
            portions[hop] = portions.get(hop, 0.0) + flow.portion
    return StageLoad(tuple([LinkLoad(hop, flows[hop], portions[hop]) for hop in flows]), longest, stage.repeats)


def input_load(fabric: Fabric, devices: Sequence[int]) -> StageLoad:
    """Input transfers of a step from hosts to devices, in equal portions."""
    portion = 1.0 / len(devices)
    flows = tuple([GradientFlow(fabric.host(device), str(device), portion) for device in devices])
    return stage_load(fabric, Stage(flows))


Floats = NDArray[np.float64]
Ints = NDArray[np.intp]


class PlacedTraining(NamedTuple):
    """A training on certain devices."""

    model: str  # name under which it is learned
    devices: tuple[int, ...]
    kinds: tuple[str, ...]  # of the devices
    samples: tuple[float, ...]  # per device and step
    gradient_bytes: float = 0.0  # 0: unknown, to be learned
    input_bytes: float = 0.0  # per sample
    exchange: str = "ring"  # gradient exchange: ring, tree, server or scatter


Group = Sequence[PlacedTraining]  # trainings that run at the same time

GRADIENTS, INPUT = 0, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLayout:
    """Flat arrays over members of all groups, their devices, transfer stages, and link loads."""

    runners: tuple[PlacedTraining, ...]
    # devices, by member
    device_member: Ints
    device_kind: Ints  # in `kinds`
    device_samples: Floats
    # stages
    stage_member: Ints
    stage_stream: Ints  # GRADIENTS or INPUT
    stage_repeats: Floats
    stage_hops: Floats  # [stage, link kind] of the longest route
    # links in a stage, kind by kind; every stage has at least one
    load_stage: Ints
    load_kind: Ints
    load_flows: Floats
    load_portion: Floats
    load_firsts: Ints  # of each stage
    # loads of different streams of one group that share a link in the same direction: the first is slowed by the other
    met_load: Ints
    met_other: Ints
    spread: Floats  # [member, 4]: devices, places they are at, most and fewest at one place

    @property
    def num_members(self) -> int:
        return len(self.runners)


class _Rows:
    """The arrays of a layout under construction."""

    def __init__(self, fabric: Fabric, kinds: Sequence[str]) -> None:
        self.fabric = fabric
        self.kinds = {kind: place for place, kind in enumerate(kinds)}
        self.link_kinds = {kind: place for place, kind in enumerate(fabric.kinds)}
        self.runners: list[PlacedTraining] = []
        self.devices: list[tuple[int, int, float]] = []
        self.stages: list[tuple[int, int, float]] = []
        self.hops: list[list[float]] = []
        self.loads: list[tuple[int, int, float, float]] = []
        self.firsts: list[int] = []
        self.met: list[tuple[int, int]] = []
        self.spread: list[tuple[float, float, float, float]] = []

    def add(self, group: Group, walks: dict[object, list[tuple[int, StageLoad]]]) -> None:
        on_hop: dict[Hop, list[tuple[tuple[int, int], int]]] = {}
        for runner in group:
            member = len(self.runners)
            self.runners.append(runner)
            for kind, samples in dict.fromkeys(zip(runner.kinds, runner.samples, strict=True)):
                # Equal devices with equal parts are equally fast.
                self.devices.append((member, self.kinds[kind], samples))
            self.spread.append(_spread(self.fabric, runner.devices))
            for stream, walked in _walks(self.fabric, runner, walks):
                self._add_stage(member, stream, walked, on_hop)
        for here in on_hop.values():
            self.met += [(one, other) for whose, one in here for theirs, other in here if whose != theirs]

    def sizes(self) -> tuple[int, int, int, int, int]:
        return len(self.runners), len(self.devices), len(self.stages), len(self.loads), len(self.met)

    def layout(
        self,
        runners: tuple[PlacedTraining, ...],
        member: _Picked,
        device: _Picked,
        stage: _Picked,
        load: _Picked,
        meeting: _Picked,
    ) -> GroupLayout:
        devices = np.array(self.devices, np.float64).reshape(-1, 3)
        staged = np.array(self.stages, np.float64).reshape(-1, 3)
        loads = np.array(self.loads, np.float64).reshape(-1, 4)
        met = np.array(self.met, np.intp).reshape(-1, 2)
        return GroupLayout(
            runners=runners,
            device_member=device.of_others(devices[:, 0].astype(np.intp), member),
            device_kind=devices[device.rows, 1].astype(np.intp),
            device_samples=devices[device.rows, 2],
            stage_member=stage.of_others(staged[:, 0].astype(np.intp), member),
            stage_stream=staged[stage.rows, 1].astype(np.intp),
            stage_repeats=staged[stage.rows, 2],
            stage_hops=np.array(self.hops, np.float64).reshape(-1, len(self.link_kinds))[stage.rows],
            load_stage=load.of_others(loads[:, 0].astype(np.intp), stage),
            load_kind=loads[load.rows, 1].astype(np.intp),
            load_flows=loads[load.rows, 2],
            load_portion=loads[load.rows, 3],
            load_firsts=stage.of_others(np.array(self.firsts, np.intp), load),
            met_load=meeting.of_others(met[:, 0], load),
            met_other=meeting.of_others(met[:, 1], load),
            spread=np.array(self.spread, np.float64).reshape(-1, 4)[member.rows],
        )

    def _add_stage(
        self, member: int, stream: int, walked: StageLoad, on_hop: dict[Hop, list[tuple[tuple[int, int], int]]]
    ) -> None:
        if not walked.loads:
            return
        stage = len(self.stages)
        self.stages.append((member, stream, float(walked.repeats)))
        counts = [0.0] * len(self.link_kinds)
        for hop in walked.hops:
            counts[self._kind(hop)] += 1.0
        self.hops.append(counts)
        self.firsts.append(len(self.loads))
        for hop, flows, portion in sorted(walked.loads, key=lambda load: self._kind(load.hop)):
            on_hop.setdefault(hop, []).append(((member, stream), len(self.loads)))
            self.loads.append((stage, self._kind(hop), float(flows), portion))

    def _kind(self, hop: Hop) -> int:
        return self.link_kinds[self.fabric.wires[hop.wire].kind]


def build_layout(fabric: Fabric, kinds: Sequence[str], groups: Sequence[Group]) -> GroupLayout:
    """The arrays of groups on a fabric with devices of certain types.

    Groups that differ only in model are laid out once, since plans query many jobs in the same places.
    """
    rows = _Rows(fabric, kinds)
    walks: dict[object, list[tuple[int, StageLoad]]] = {}
    places: dict[object, int] = {}
    of: list[int] = []
    sizes = [rows.sizes()]
    for group in groups:
        place = places.setdefault(tuple([_shape(runner) for runner in group]), len(places))
        if place == len(sizes) - 1:
            rows.add(group, walks)
            sizes.append(rows.sizes())
        of.append(place)
    bounds, which = np.array(sizes, np.intp), np.array(of, np.intp)
    picked = [_Picked.of(bounds[:, column], which) for column in range(bounds.shape[1])]
    return rows.layout(tuple([runner for group in groups for runner in group]), *picked)


def _shape(runner: PlacedTraining) -> tuple[object, ...]:
    """Everything of a training that its rows depend on."""
    return runner.devices, runner.kinds, runner.samples, runner.input_bytes > 0.0, runner.exchange


class _Picked(NamedTuple):
    """Rows of distinct groups, repeated for each equal group."""

    rows: Ints
    counts: Ints  # [group]
    shift: Ints  # [group] how much further down its rows are than those of the one it is like

    @classmethod
    def of(cls, bounds: Ints, which: Ints) -> _Picked:
        """From the row ranges of distinct groups, and the index of each group among them."""
        counts = np.diff(bounds)[which]
        shift = np.cumsum(counts) - counts - bounds[which]
        return cls(np.arange(counts.sum()) - np.repeat(shift, counts), counts, shift)

    def of_others(self, numbers: Ints, others: _Picked) -> Ints:
        """Indices of other rows that these rows refer to."""
        return np.asarray(numbers[self.rows] + np.repeat(others.shift, self.counts))


def _walks(
    fabric: Fabric, runner: PlacedTraining, known: dict[object, list[tuple[int, StageLoad]]]
) -> list[tuple[int, StageLoad]]:
    """Every transfer stage of a training with its stream; cached by devices."""
    key = (runner.devices, runner.exchange, runner.input_bytes > 0.0)
    found = known.get(key)
    if found is None:
        found = [(GRADIENTS, stage_load(fabric, stage)) for stage in stages(fabric, runner.devices, runner.exchange)]
        if runner.input_bytes > 0.0:
            found.append((INPUT, input_load(fabric, runner.devices)))
        known[key] = found
    return found


def _spread(fabric: Fabric, devices: Sequence[int]) -> tuple[float, float, float, float]:
    counts: dict[str, int] = {}
    for device in devices:
        host = fabric.host(device)
        counts[host] = counts.get(host, 0) + 1
    return float(len(devices)), float(len(counts)), float(max(counts.values())), float(min(counts.values()))
