"""Interference: the contract, oracles that are known exactly, and groups that were measured."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.core.errors import InputError
from carpool.core.estimates import Estimate
from carpool.predictors.gaussian_process import GaussianRegressor
from carpool.predictors.sharing.colocation import ColocationTable
from carpool.predictors.sharing.interference import Interference, Member, features
from carpool.testing import PredictorContract


def made_up(count: int, seed: int) -> tuple[list[list[Member]], list[list[float]]]:
    """Groups of trainings with one trait, their use u: each keeps 1 / max(1, Σ min(u, share))."""
    rng = Random(seed)
    groups, kept = [], []
    for _ in range(count):
        uses = [rng.uniform(0.2, 1.0) for _ in range(rng.choice((2, 2, 3, 4)))]
        shares = [rng.choice((0.25, 0.5, 1.0)) for _ in uses]
        demand = sum(map(min, uses, shares))
        groups.append([Member((use,), share, min(1.0, share / use)) for use, share in zip(uses, shares, strict=True)])
        kept.append([1.0 / max(1.0, demand)] * len(uses))
    return groups, kept


class TestContract(PredictorContract):
    def make_predictor(self) -> Interference:
        return Interference(trees=10)

    def load(self, path: Path) -> Interference:
        return Interference.load(path)

    def samples(self) -> tuple[Sequence[Any], Sequence[Any]]:
        return made_up(12, seed=1)


class TestForest(TestContract):
    def make_predictor(self) -> Interference:
        return Interference("forest", trees=10)


def error(model: Interference, groups: list[list[Member]], kept: list[list[float]]) -> float:
    answers = model.predict(groups)
    pairs = [(a.mean, k) for found, row in zip(answers, kept, strict=True) for a, k in zip(found, row, strict=True)]
    return float(np.mean([abs(mean / value - 1.0) for mean, value in pairs]))


@pytest.mark.parametrize(("method", "limit"), [("gp", 0.05), ("forest", 0.15), ("both", 0.08)])
def test_learns_a_known_law(method: Any, limit: float) -> None:
    model = Interference(method, trees=40).fit(*made_up(100, seed=2))
    assert error(model, *made_up(60, seed=3)) < limit


def test_alone_everything_is_kept() -> None:
    model = Interference("gp").fit(*made_up(10, seed=0))
    assert model.predict([[Member((0.5,), 0.3)], []]) == [[Estimate(1.0)], []]


def test_the_order_of_the_others_does_not_matter() -> None:
    one, two, three = (Member((use,), share) for use, share in ((0.3, 1.0), (0.7, 0.5), (0.9, 0.25)))
    assert features([one, two, three], 0).tolist() == pytest.approx(features([one, three, two], 0).tolist())
    assert features([one, two, three], 0).tolist() != pytest.approx(features([two, one, three], 0).tolist())


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.floats(0.05, 1.0), st.floats(0.05, 1.0)), min_size=2, max_size=6))
def test_kept_is_a_part(members: list[tuple[float, float]]) -> None:
    (answer,) = MODEL.predict([[Member((use,), share) for use, share in members]])
    assert all(0.0 < estimate.mean <= 1.0 and estimate.std >= 0.0 for estimate in answer)


MODEL = Interference("gp").fit(*made_up(20, seed=4))


def test_before_anything_is_learned_it_says_so() -> None:
    with pytest.raises(InputError, match="no measured groups"):
        Interference().predict([[Member((0.5,)), Member((0.5,))]])


def test_a_value_for_each_member() -> None:
    with pytest.raises(InputError, match="group of 2 comes with 1"):
        Interference().fit([[Member((0.5,)), Member((0.5,))]], [[0.5]])


def test_a_file_that_is_something_else(tmp_path: Path) -> None:
    (tmp_path / "other").write_text('{"schema": 1}')
    with pytest.raises(InputError, match="not a saved interference model"):
        Interference.load(tmp_path / "other")


def test_measured_groups_that_were_held_out(colocation: ColocationTable) -> None:
    order = np.random.default_rng(0).permutation(len(colocation.groups))
    seen = [colocation.groups[i] for i in order[:135]]
    unseen = [colocation.groups[i] for i in order[135:]]
    model = Interference("gp").fit(*colocation.samples(seen))
    assert error(model, *colocation.samples(unseen)) < 0.12


def test_spread_covers_the_errors(colocation: ColocationTable) -> None:
    model = Interference("gp").fit(*colocation.samples(colocation.groups[::2]))
    groups, kept = colocation.samples(colocation.groups[1::2])
    within = [
        abs(a.mean - k) <= 2.0 * a.std
        for found, row in zip(model.predict(groups), kept, strict=True)
        for a, k in zip(found, row, strict=True)
    ]
    assert 0.85 < np.mean(within) <= 1.0


def test_gaussian_process_interpolates_and_doubts() -> None:
    rows = np.linspace(0.0, 6.0, 13)[:, None]
    model = GaussianRegressor().fit(rows, np.sin(rows[:, 0]))
    mean, std = model.predict(np.array([[1.25], [20.0]]))
    assert mean[0] == pytest.approx(np.sin(1.25), abs=0.05)
    assert std[1] > 3.0 * std[0]
    assert exp(mean[1]) > 0.0
