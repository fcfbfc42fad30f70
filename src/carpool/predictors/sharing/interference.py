"""Interference model: the fraction of its speed each training keeps when it shares a device.

A training is described by traits measured alone, not by name, so one never seen in a group is predicted from its
profile. After Chen et al., "Interference-aware Multiplexing for Deep Learning in GPU Clusters",
SC 2023, which learns from the pattern of a co-location (which tasks, how many) with a random forest.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain
from math import exp
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from carpool.core.errors import InputError
from carpool.core.estimates import Estimate
from carpool.predictors.gaussian_process import GaussianRegressor

Floats = NDArray[np.float64]
Method = Literal["forest", "gp", "both"]

_SCHEMA = 1
_LEAST = 1e-3  # least fraction of its speed that a training keeps


class Member(NamedTuple):
    """A training in a group on one device."""

    traits: tuple[float, ...]  # features; the same for all members a model learns from
    share: float = 1.0  # of the device, a cap; the shares of a group may sum past 1
    alone: float = 1.0  # its speed alone under that cap, relative to alone without


Group = Sequence[Member]


class Interference:
    """Predicts the fraction each member of a group keeps: its rate in the group over alone at the same share.

    log(kept) is learned from the member's traits and share, and from the number, load, largest share, and the sum,
    mean (both weighted by share) and maximum of its neighbours' traits. ``forest`` is an ensemble of extremely
    randomized trees (Geurts et al., 2006), ``gp`` a Gaussian process; ``both`` takes the mean of the two in log
    space, the best of the three on every table tried (``benchmarks/interference.py``).
    """

    def __init__(self, method: Method = "both", trees: int = 100, seed: int = 0) -> None:
        self.method = method
        self.trees = trees
        self.seed = seed

    def fit(self, groups: Sequence[Group], kept: Sequence[Sequence[float]]) -> Interference:
        """Learn from scratch; the fit itself is computed on first use."""
        self.groups_: list[tuple[Member, ...]] = []
        self.kept_: list[tuple[float, ...]] = []
        return self.update(groups, kept)

    def update(self, groups: Sequence[Group], kept: Sequence[Sequence[float]]) -> Interference:
        """Learn from more groups; equal to fitting all at once."""
        if not hasattr(self, "groups_"):
            return self.fit(groups, kept)
        for group, values in zip(groups, kept, strict=True):
            if len(group) != len(values):
                raise InputError(f"a group of {len(group)} comes with {len(values)} measured values")
            self.groups_.append(tuple(group))
            self.kept_.append(tuple(map(float, values)))
        self._models: tuple[Any, ...] | None = None
        return self

    @property
    def num_groups(self) -> int:
        return sum(len(group) > 1 for group in getattr(self, "groups_", ()))

    def predict(self, groups: Sequence[Group]) -> list[list[Estimate]]:
        """The fraction each member of each group keeps, in (0, 1]; 1 alone."""
        rows = [features(group, place) for group in groups if len(group) > 1 for place in range(len(group))]
        means, spreads = self._log_kept(np.array(rows)) if rows else (np.empty(0), np.empty(0))
        answers = iter([_as_estimate(mean, spread) for mean, spread in zip(means, spreads, strict=True)])
        return [[next(answers) for _ in group] if len(group) > 1 else [Estimate(1.0)] * len(group) for group in groups]

    def save(self, path: str | Path) -> None:
        document = {
            "schema": _SCHEMA,
            "method": self.method,
            "trees": self.trees,
            "seed": self.seed,
            "groups": getattr(self, "groups_", []),
            "kept": getattr(self, "kept_", []),
        }
        Path(path).write_text(json.dumps(document), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Interference:
        try:
            document = json.loads(Path(path).read_text(encoding="utf-8"))
            groups = [
                [Member(tuple(traits), share, alone) for traits, share, alone in group] for group in document["groups"]
            ]
            model = cls(document["method"], document["trees"], document["seed"])
            return model.fit(groups, document["kept"]) if groups else model
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"is not a saved interference model: {error}", where=str(path)) from None

    def _log_kept(self, rows: Floats) -> tuple[Floats, Floats]:
        if not self.num_groups:
            raise InputError("the interference model has no measured groups", way_out="Call fit with measured groups.")
        answers = [_answer(model, rows) for model in self._fitted()]
        mean = np.mean([answer[0] for answer in answers], axis=0)
        within = np.mean([answer[1] ** 2 for answer in answers], axis=0)
        apart = np.var([answer[0] for answer in answers], axis=0)
        return mean, np.sqrt(within + apart)

    def _fitted(self) -> tuple[Any, ...]:
        if self._models is None:
            pairs = [(group, kept) for group, kept in zip(self.groups_, self.kept_, strict=True) if len(group) > 1]
            rows = np.array([features(group, place) for group, _ in pairs for place in range(len(group))])
            values = np.array(list(chain.from_iterable(kept for _, kept in pairs)))
            targets = np.log(np.maximum(values, _LEAST))
            models: list[Any] = []
            if self.method in ("gp", "both"):
                models.append(GaussianRegressor().fit(rows, targets))
            if self.method in ("forest", "both"):
                from sklearn.ensemble import ExtraTreesRegressor  # type: ignore[import-untyped]  # a second to import

                forest = ExtraTreesRegressor(self.trees, max_features=0.5, random_state=self.seed)
                models.append(forest.fit(rows, targets))
            self._models = tuple(models)
        return self._models


def features(group: Group, place: int) -> Floats:
    """Features of one member of a group."""
    own = group[place]
    others = [*group[:place], *group[place + 1 :]]
    traits = np.array([other.traits for other in others])
    shares = np.array([other.share for other in others])
    most, pressing = traits.max(0), shares @ traits
    alone = np.log([max(other.alone, _LEAST) for other in others]).mean()
    load = float(shares.sum())
    overall = (own.share, np.log(max(own.alone, _LEAST)), len(others), load, shares.max(), own.share + load, alone)
    return np.concatenate((own.traits, overall, pressing / load, most, pressing, np.asarray(own.traits) - most))


def _answer(model: Any, rows: Floats) -> tuple[Floats, Floats]:
    if isinstance(model, GaussianRegressor):
        return model.predict(rows)
    votes = np.array([tree.predict(rows) for tree in model.estimators_])
    return votes.mean(0), votes.std(0)


def _as_estimate(mean: float, spread: float) -> Estimate:
    """From log space: the median, at most 1, and a first-order spread."""
    kept = min(1.0, exp(mean))
    return Estimate(kept, kept * min(float(spread), 1.0))
