"""Groups that are alike are looked at once, and have the rows they would have had."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from carpool.core.topology import Cluster
from carpool.predictors.links.fabric import Fabric
from carpool.predictors.links.layout import GroupLayout, PlacedTraining, build_layout

CLUSTER = Cluster.build([(2, 4, "V100")])
FABRIC = Fabric.of(CLUSTER)


def runner(model: str, devices: tuple[int, ...], input_bytes: float = 0.0) -> PlacedTraining:
    return PlacedTraining(model, devices, ("V100",) * len(devices), (16.0,) * len(devices), input_bytes=input_bytes)


SHAPES = [
    [runner("a", (0,))],
    [runner("a", (0, 1, 4))],
    [runner("a", (0, 4), 3.0), runner("b", (1, 5))],
    [runner("b", (2, 3), 5.0)],
]


class CountingFabric(Fabric):
    """Counts how often it is asked for the host of a device."""

    asked = 0

    def host(self, device: int) -> str:
        self.asked += 1
        return super().host(device)


def one_after_another(layouts: list[GroupLayout]) -> dict[str, np.ndarray]:
    """The arrays of layouts joined by hand."""
    counts = {"member": 0, "stage": 0, "load": 0}
    shifted = {
        "device_member": "member",
        "stage_member": "member",
        "load_stage": "stage",
        "load_firsts": "load",
        "met_load": "load",
        "met_other": "load",
    }
    parts: dict[str, list[np.ndarray]] = {}
    for layout in layouts:
        for field in fields(GroupLayout)[1:]:
            by = counts.get(shifted.get(field.name, ""), 0)
            parts.setdefault(field.name, []).append(getattr(layout, field.name) + by)
        counts["member"] += layout.num_members
        counts["stage"] += len(layout.stage_member)
        counts["load"] += len(layout.load_stage)
    return {name: np.concatenate(arrays) for name, arrays in parts.items()}


@given(st.lists(st.sampled_from(SHAPES), min_size=1, max_size=8))
def test_groups_together_are_the_groups_one_after_another(groups: list[list[PlacedTraining]]) -> None:
    whole = build_layout(FABRIC, ["V100"], groups)
    joined = one_after_another([build_layout(FABRIC, ["V100"], [group]) for group in groups])
    assert whole.runners == tuple(runner for group in groups for runner in group)
    for name, array in joined.items():
        assert np.array_equal(getattr(whole, name), array), name


def test_twice_the_jobs_in_a_place_are_not_looked_at_twice() -> None:
    counts = []
    for jobs in (5, 10):
        fabric = CountingFabric(FABRIC.wires)
        build_layout(fabric, ["V100"], [[runner(f"t{job}", (0, 1, 4))] for job in range(jobs)])
        counts.append(fabric.asked)
    assert counts[0] == counts[1] > 0
