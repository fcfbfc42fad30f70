"""Groups of trainings on their devices as arrays: who computes what, and whose transfers meet on which link."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from carpool.predictors.fabric import Fabric, Hop
from carpool.predictors.transfers import Walked, fed, stages, walk

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]


class Runner(NamedTuple):
    """A training on certain devices, as a model of throughput sees it."""

    model: str  # what is learned of it is filed under this name
    devices: tuple[int, ...]
    kinds: tuple[str, ...]  # of the devices
    samples: tuple[float, ...]  # that each of them computes in a step
    gradient_bytes: float = 0.0  # 0: unknown, to be learned
    input_bytes: float = 0.0  # of one sample, on its way to a device in every step
    exchange: str = "ring"  # how gradients are added up, see `transfers`


Group = Sequence[Runner]  # trainings that run at the same time

GRADIENTS, INPUT = 0, 1


@dataclass(frozen=True, slots=True)
class Layout:
    """Flat arrays over members (runners of all groups), their devices, stages of transfers, and links in a stage."""

    runners: tuple[Runner, ...]
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
        """Runners of all groups."""
        return len(self.runners)


class _Rows:
    """The arrays of a layout while they grow."""

    def __init__(self, fabric: Fabric, kinds: Sequence[str]) -> None:
        self.fabric = fabric
        self.kinds = {kind: place for place, kind in enumerate(kinds)}
        self.link_kinds = {kind: place for place, kind in enumerate(fabric.kinds)}
        self.runners: list[Runner] = []
        self.devices: list[tuple[int, int, float]] = []
        self.stages: list[tuple[int, int, float]] = []
        self.hops: list[list[float]] = []
        self.loads: list[tuple[int, int, float, float]] = []
        self.firsts: list[int] = []
        self.met: list[tuple[int, int]] = []
        self.spread: list[tuple[float, float, float, float]] = []

    def add(self, group: Group, walks: dict[object, list[tuple[int, Walked]]]) -> None:
        """One more group."""
        on_hop: dict[Hop, list[tuple[tuple[int, int], int]]] = {}
        for runner in group:
            member = len(self.runners)
            self.runners.append(runner)
            for kind, samples in dict.fromkeys(zip(runner.kinds, runner.samples, strict=True)):
                self.devices.append((member, self.kinds[kind], samples))  # like devices with like parts are as fast
            self.spread.append(_spread(self.fabric, runner.devices))
            for stream, walked in _walks(self.fabric, runner, walks):
                self._add_stage(member, stream, walked, on_hop)
        for here in on_hop.values():
            self.met += [(one, other) for whose, one in here for theirs, other in here if whose != theirs]

    def _add_stage(
        self, member: int, stream: int, walked: Walked, on_hop: dict[Hop, list[tuple[tuple[int, int], int]]]
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


def lay_out(fabric: Fabric, kinds: Sequence[str], groups: Sequence[Group]) -> Layout:
    """The arrays of groups on a fabric with devices of certain kinds."""
    rows = _Rows(fabric, kinds)
    walks: dict[object, list[tuple[int, Walked]]] = {}
    for group in groups:
        rows.add(group, walks)
    devices = np.array(rows.devices, np.float64).reshape(-1, 3)
    staged = np.array(rows.stages, np.float64).reshape(-1, 3)
    loads = np.array(rows.loads, np.float64).reshape(-1, 4)
    met = np.array(rows.met, np.intp).reshape(-1, 2)
    return Layout(
        tuple(rows.runners),
        devices[:, 0].astype(np.intp),
        devices[:, 1].astype(np.intp),
        devices[:, 2],
        staged[:, 0].astype(np.intp),
        staged[:, 1].astype(np.intp),
        staged[:, 2],
        np.array(rows.hops, np.float64).reshape(-1, len(rows.link_kinds)),
        loads[:, 0].astype(np.intp),
        loads[:, 1].astype(np.intp),
        loads[:, 2],
        loads[:, 3],
        np.array(rows.firsts, np.intp),
        met[:, 0],
        met[:, 1],
        np.array(rows.spread, np.float64).reshape(-1, 4),
    )


def _walks(fabric: Fabric, runner: Runner, known: dict[object, list[tuple[int, Walked]]]) -> list[tuple[int, Walked]]:
    """Every stage of a runner's transfers with its stream; the same devices are walked once."""
    key = (runner.devices, runner.exchange, runner.input_bytes > 0.0)
    found = known.get(key)
    if found is None:
        found = [(GRADIENTS, walk(fabric, stage)) for stage in stages(fabric, runner.devices, runner.exchange)]
        if runner.input_bytes > 0.0:
            found.append((INPUT, fed(fabric, runner.devices)))
        known[key] = found
    return found


def _spread(fabric: Fabric, devices: Sequence[int]) -> tuple[float, float, float, float]:
    counts: dict[str, int] = {}
    for device in devices:
        host = fabric.host(device)
        counts[host] = counts.get(host, 0) + 1
    return float(len(devices)), float(len(counts)), float(max(counts.values())), float(min(counts.values()))
