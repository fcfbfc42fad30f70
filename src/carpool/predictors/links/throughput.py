"""Throughput predictor: step time on any devices of a fabric, learned from the steps of all trainings.

"The system collects data transaction performance from online execution history across multiple jobs over various
inter-GPU links to be used in future estimations" (Hwang et al., "Efficient Resource Sharing for Distributed Deep
Learning"): every transfer of a step is routed over the links (`layout`), link speeds are fitted to the steps of all
jobs (`fit`), and the residual of each training follows a Gaussian process of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from carpool.core.errors import InputError
from carpool.core.estimates import Estimate
from carpool.predictors.gaussian_process import GaussianRegressor
from carpool.predictors.links.fabric import Fabric, FabricLink
from carpool.predictors.links.fit import fit, fit_trainings, reference_trainings
from carpool.predictors.links.layout import Floats, Group, Ints, PlacedTraining, build_layout
from carpool.predictors.links.step_model import StepModel, StepParams

_SCHEMA = 1
_FEWEST = 12  # steps of a training before its residuals are modelled
_ROWS = 240  # steps used for that, at most
_NOISES = (0.03, 0.1, 0.3, 1.0)
_LEAST = 0.02  # relative spread, however good the fit is
_GUESSED = 0.5  # least relative spread for an unseen training, device type or link type


class Throughput:
    """Learns from groups of concurrent trainings, and predicts step times in any other group.

    Shared parameters are speed and latency per link type and slowness per device type. Per training: fixed and per-
    sample time, overlap of transfers and compute, and gradient bytes where not declared.
    """

    def __init__(self, fabric: Fabric, *, habits: bool = True) -> None:
        self.fabric = fabric
        self.habits = habits  # whether to model the residuals of each training

    def fit(self, groups: Sequence[Group], seconds: Sequence[Sequence[float]]) -> Throughput:
        """Learn from scratch; the fit itself is computed on first use."""
        self.groups_: list[tuple[PlacedTraining, ...]] = []
        self.seconds_: list[tuple[float, ...]] = []
        return self.update(groups, seconds)

    def update(self, groups: Sequence[Group], seconds: Sequence[Sequence[float]]) -> Throughput:
        """Learn from more groups; equal to fitting all at once."""
        if not hasattr(self, "groups_"):
            return self.fit(groups, seconds)
        for group, values in zip(groups, seconds, strict=True):
            if len(group) != len(values) or min(values, default=0.0) <= 0.0:
                raise InputError(f"a group of {len(group)} comes with step times {list(values)}")
            self.groups_.append(tuple(group))
            self.seconds_.append(tuple(map(float, values)))
        self._learned: _Learned | None = None
        return self

    def predict(self, groups: Sequence[Group]) -> list[list[Estimate]]:
        """Seconds of a step of each member of each group."""
        learned = self._fitted()
        answers = iter(learned.answers(self.fabric, groups))
        return [[next(answers) for _ in group] for group in groups]

    @property
    def num_steps(self) -> int:
        return sum(map(len, getattr(self, "groups_", ())))

    def link_speeds(self) -> Mapping[str, float]:
        """Bytes per second of each link type, as learned from steps."""
        return dict(zip(self.fabric.kinds, np.exp(self._fitted().figures.speed).tolist(), strict=True))

    def save(self, path: str | Path) -> None:
        document = {
            "schema": _SCHEMA,
            "wires": self.fabric.wires,
            "habits": self.habits,
            "groups": getattr(self, "groups_", []),
            "seconds": getattr(self, "seconds_", []),
        }
        Path(path).write_text(json.dumps(document), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Throughput:
        try:
            document = json.loads(Path(path).read_text(encoding="utf-8"))
            fabric = Fabric([FabricLink((ends[0], ends[1]), kind) for ends, kind in document["wires"]])
            groups = [[_runner(*runner) for runner in group] for group in document["groups"]]
            model = cls(fabric, habits=document["habits"])
            return model.fit(groups, document["seconds"]) if groups else model
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"is not a saved throughput model: {error}", where=str(path)) from None

    def _fitted(self) -> _Learned:
        if not self.num_steps:
            raise InputError("throughput has been learned from no step", way_out="Call fit with measured groups.")
        if self._learned is None:
            self._learned = _Learned(self.fabric, self.groups_, self.seconds_, habits=self.habits)
        return self._learned


class _Learned:
    """The result of a fit."""

    def __init__(
        self, fabric: Fabric, groups: Sequence[Group], seconds: Sequence[Sequence[float]], *, habits: bool
    ) -> None:
        runners = [runner for group in groups for runner in group]
        self._trainings = {name: place for place, name in enumerate(dict.fromkeys(each.model for each in runners))}
        self._kinds = list(dict.fromkeys(kind for runner in runners for kind in runner.kinds))
        steps = self._steps(fabric, groups)
        measured = np.array([value for values in seconds for value in values])
        self.figures = self._fitted(fabric, groups, steps, measured)
        self._links = {kind for kind, uses in zip(fabric.kinds, steps.link_uses(), strict=True) if uses}
        compute, sync, total = steps.parts(self.figures)
        left = np.log(measured / total)
        self._with_average = self.figures.with_average()  # for unseen trainings
        self._counts = np.bincount(steps.training, minlength=len(self._trainings) + 1).astype(float)  # steps of each
        self._error = float(np.sqrt(np.mean(left**2)))
        self._habits = self._learn_habits(steps, _features(steps, compute, sync), left) if habits else {}

    def _fitted(self, fabric: Fabric, groups: Sequence[Group], steps: StepModel, measured: Floats) -> StepParams:
        """Fit all trainings together, or, if there are many, some together and the others after them."""
        expected = StepParams.expected(fabric, len(self._kinds), len(self._trainings))
        chosen = reference_trainings(steps)
        is_chosen = np.array([training in chosen for training in steps.training.tolist()])
        if is_chosen.all():
            return fit(steps, measured, expected)
        firsts = np.cumsum([0, *map(len, groups)])
        is_chosen = np.repeat([is_chosen[a:b].any() for a, b in pairwise(firsts.tolist())], np.diff(firsts))
        some = [group for group, first in zip(groups, firsts.tolist(), strict=False) if is_chosen[first]]
        trainings = {each: place for place, each in enumerate(dict.fromkeys(steps.training[is_chosen].tolist()))}
        layout = build_layout(fabric, self._kinds, some)
        few = StepModel(layout, [trainings[each] for each in steps.training[is_chosen].tolist()])
        known = fit(few, measured[is_chosen], StepParams.expected(fabric, len(self._kinds), len(trainings)))
        return fit_trainings(steps, measured, expected, known)

    def _learn_habits(self, steps: StepModel, features: Floats, left: Floats) -> dict[int, _Habit]:
        habits: dict[int, _Habit] = {}
        for training, mine in _by_training(steps):
            if len(mine) >= _FEWEST:
                rows = mine[:: -(-len(mine) // _ROWS)]
                habits[training] = _Habit(features[rows], left[rows])
        return habits

    def answers(self, fabric: Fabric, groups: Sequence[Group]) -> list[Estimate]:
        if not any(groups):
            return []
        runners = [runner for group in groups for runner in group]
        strange = self._are_strange(fabric, runners)
        if not {kind for kinds in {runner.kinds for runner in runners} for kind in kinds} <= set(self._kinds):
            groups = [[self._like_known(runner) for runner in group] for group in groups]
        steps = self._steps(fabric, groups)
        compute, sync, total = steps.parts(self._with_average)
        features = _features(steps, compute, sync)
        seen = self._counts[steps.training]
        shift, spread = np.zeros(len(total)), np.hypot(self._error, _GUESSED / (1.0 + seen))
        for training, mine in _by_training(steps) if self._habits else ():
            habit = self._habits.get(training)
            if habit is not None:
                shift[mine], apart = habit.predict(features[mine])
                spread[mine] = np.clip(apart, _LEAST, 1.0)
        means = total * np.exp(shift)
        spreads = means * np.where(strange, np.hypot(_GUESSED, spread), spread)
        return [Estimate(mean, apart) for mean, apart in zip(means.tolist(), spreads.tolist(), strict=True)]

    def _are_strange(self, fabric: Fabric, runners: Sequence[PlacedTraining]) -> list[bool]:
        places = dict.fromkeys((runner.devices, runner.kinds) for runner in runners)
        strange = {place: self._is_strange(fabric, *place) for place in places}
        return [each.model not in self._trainings or strange[each.devices, each.kinds] for each in runners]

    def _is_strange(self, fabric: Fabric, devices: Sequence[int], kinds: Sequence[str]) -> bool:
        if not set(kinds) <= set(self._kinds):
            return True
        first = str(devices[0])
        used = {fabric.wires[hop.wire].kind for other in devices for hop in fabric.route(first, str(other))}
        return not used <= self._links

    def _like_known(self, runner: PlacedTraining) -> PlacedTraining:
        kinds = tuple([kind if kind in self._kinds else self._kinds[0] for kind in runner.kinds])
        return runner if kinds == runner.kinds else runner._replace(kinds=kinds)

    def _steps(self, fabric: Fabric, groups: Sequence[Group]) -> StepModel:
        stranger = len(self._trainings)
        layout = build_layout(fabric, self._kinds, groups)
        return StepModel(layout, [self._trainings.get(runner.model, stranger) for runner in layout.runners])


class _Habit:
    """Residuals of one training, without extrapolation."""

    def __init__(self, features: Floats, left: Floats) -> None:
        self._reach = features.min(axis=0), features.max(axis=0)
        self._process = GaussianRegressor(noises=_NOISES).fit(features, left)

    def predict(self, features: Floats) -> tuple[Floats, Floats]:
        return self._process.predict(np.clip(features, *self._reach))


def _by_training(steps: StepModel) -> Iterator[tuple[int, Ints]]:
    order = np.argsort(steps.training, kind="stable")
    trainings, firsts = np.unique(steps.training[order], return_index=True)
    yield from zip(trainings.tolist(), np.split(order, firsts[1:]), strict=True)


def _features(steps: StepModel, compute: Floats, sync: Floats) -> Floats:
    """A member's features: spread of its devices, samples, and the weight of transfers."""
    weight = np.log(np.maximum(sync, 1e-6 * compute) / compute)
    return np.column_stack([np.log(steps.layout.spread), np.log(steps.most_samples), np.log(compute), weight])


def _runner(
    model: str,
    devices: Sequence[int],
    kinds: Sequence[str],
    samples: Sequence[float],
    gradient_bytes: float,
    input_bytes: float,
    exchange: str,
) -> PlacedTraining:
    return PlacedTraining(model, tuple(devices), tuple(kinds), tuple(samples), gradient_bytes, input_bytes, exchange)
