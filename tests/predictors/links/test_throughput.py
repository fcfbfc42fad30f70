"""Throughput over links: the contract, laws that are known exactly, and trainings on placements never seen."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from carpool.core.errors import InputError
from carpool.core.topology import Cluster
from carpool.predictors.links.fabric import NETWORK, Fabric
from carpool.predictors.links.layout import PlacedTraining
from carpool.predictors.links.throughput import Throughput
from carpool.testing import PredictorContract

CLUSTER = Cluster.build([(4, 4, "T4")])
FABRIC = Fabric.of(CLUSTER)
BUS, NET = 2e9, 2e8  # bytes per second
SIZES = {"small": (0.02, 0.001, 5e7), "large": (0.1, 0.01, 4e8)}  # a, b, bytes


def runner(model: str, counts: Sequence[int], samples: float) -> PlacedTraining:
    devices = tuple(4 * node + place for node, count in enumerate(counts) for place in range(count))
    width = len(devices)
    return PlacedTraining(model, devices, ("T4",) * width, (samples,) * width, SIZES[model][2])


def truth(model: str, counts: Sequence[int], samples: float) -> float:
    """A ring whose slowest link is the network, or the bus inside a node; nothing is hidden."""
    fixed, per_sample, num_bytes = SIZES[model]
    width = sum(counts)
    speed = NET if len(counts) > 1 else BUS
    return fixed + per_sample * samples + 2 * (width - 1) / width * num_bytes / speed


def history(shapes: Sequence[Sequence[int]]) -> tuple[list[list[PlacedTraining]], list[list[float]]]:
    asked = list(product(SIZES, shapes, (8.0, 16.0, 32.0)))
    return [[runner(*each)] for each in asked], [[truth(*each)] for each in asked]


class TestContract(PredictorContract):
    tolerance = 1e-6

    def make_predictor(self) -> Throughput:
        return Throughput(FABRIC)

    def load(self, path: Path) -> Throughput:
        return Throughput.load(path)

    def samples(self) -> tuple[Sequence[Any], Sequence[Any]]:
        return history([(1,), (2,), (2, 2)])


def test_placements_never_seen() -> None:
    model = Throughput(FABRIC).fit(*history([(1,), (2,), (4,), (1, 1), (2, 2), (1, 1, 1)]))
    groups, seconds = history([(3,), (1, 3), (4, 4), (1, 2, 4), (4, 4, 4, 4)])
    found = np.array([answer.mean for (answer,) in model.predict(groups)])
    assert np.abs(found / np.array(seconds)[:, 0] - 1.0).max() < 0.15
    assert np.abs(found / np.array(seconds)[:, 0] - 1.0).mean() < 0.06


def test_link_speeds_are_learned() -> None:
    model = Throughput(FABRIC).fit(*history([(1,), (2,), (4,), (1, 1), (2, 2), (1, 1, 1)]))
    speeds = model.link_speeds()
    assert speeds[NETWORK] == pytest.approx(NET, rel=0.35)
    assert speeds["bus of T4"] == pytest.approx(BUS, rel=0.5)


def test_one_training_learns_from_the_other() -> None:
    """The large one was never on two nodes: what the network costs it is known from the small one."""
    shapes = [(1,), (2,), (4,), (1, 1), (2, 2), (1, 1, 1), (4, 4)]
    groups, seconds = history(shapes)
    fabric_known = [
        place for place, (each,) in enumerate(groups) if each.model == "small" or max(each.devices, default=0) < 4
    ]
    model = Throughput(FABRIC).fit([groups[i] for i in fabric_known], [seconds[i] for i in fabric_known])
    (found,) = model.predict([[runner("large", (2, 2), 16.0)]])[0]
    assert found.mean == pytest.approx(truth("large", (2, 2), 16.0), rel=0.25)


def test_of_many_trainings_those_that_did_not_tell_of_links_are_known_as_well() -> None:
    groups, seconds = history([(1,), (2,), (1, 1), (2, 2)])
    for number in range(60):  # more than it takes to know the links, and seen less
        for counts in ((1,), (2,)):
            groups.append([runner("small", counts, 16.0)._replace(model=f"copy {number}")])
            seconds.append([truth("small", counts, 16.0)])
    model = Throughput(FABRIC).fit(groups, seconds)
    asked = [[runner("small", (2, 2), 16.0)._replace(model=f"copy {number}")] for number in range(60)]
    found = np.array([answer.mean for (answer,) in model.predict(asked)])
    assert np.abs(found / truth("small", (2, 2), 16.0) - 1.0).max() < 0.2


def test_trainings_on_one_device_each_say_nothing_of_links() -> None:
    seen = [[runner("small", (1,), 16.0)._replace(model=f"copy {number}")] for number in range(60)]
    model = Throughput(FABRIC).fit(seen, [[0.1 * (1 + number % 3)] for number in range(60)])
    assert [answer.mean for (answer,) in model.predict(seen[:3])] == pytest.approx([0.1, 0.2, 0.3], rel=0.01)


def test_a_stranger_is_answered_with_doubt() -> None:
    model = Throughput(FABRIC).fit(*history([(1,), (2,)]))
    known, stranger = (
        model.predict([[each]])[0][0]
        for each in (runner("small", (2,), 8.0), runner("small", (2,), 8.0)._replace(model="other"))
    )
    assert stranger.std / stranger.mean >= 0.5 > known.std / known.mean
    far = model.predict([[runner("small", (1, 1), 8.0)]])[0][0]
    assert far.std / far.mean >= 0.5, "the network was never used"


def test_others_on_the_same_link_slow_each_other() -> None:
    """Two trainings whose rings cross the same network links, against each alone."""
    model = Throughput(FABRIC).fit(*history([(1,), (2,), (1, 1), (2, 2)]))
    one = runner("large", (2, 2), 8.0)
    other = one._replace(devices=(2, 3, 6, 7))
    alone = model.predict([[one]])[0][0].mean
    both = model.predict([[one, other]])[0]
    assert [answer.mean > 1.2 * alone for answer in both] == [True, True]
    apart = other._replace(devices=(10, 11, 14, 15))
    assert model.predict([[one, apart]])[0][0].mean == pytest.approx(alone)


def test_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="learned from no step"):
        Throughput(FABRIC).predict([[runner("small", (1,), 8.0)]])
    with pytest.raises(InputError, match="group of 1"):
        Throughput(FABRIC).fit([[runner("small", (1,), 8.0)]], [[0.0]])
    (tmp_path / "no").write_text("{}")
    with pytest.raises(InputError, match="not a saved"):
        Throughput.load(tmp_path / "no")
