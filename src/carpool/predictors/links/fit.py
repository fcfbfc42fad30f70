"""Least-squares fit of link speeds, device types and trainings to measured step times."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from carpool.numerics import one_thread
from carpool.predictors.links.layout import Floats, Ints
from carpool.predictors.links.step_model import KeyIndex, Lookup, PerKeyParams, StepModel, StepParams

_ERROR = 0.05  # relative error of a measured step that counts as usual
_OFTEN = 3  # measured steps of a batch size before it has a parameter of its own
# prior standard deviations in logarithms, first of parameters that all trainings share
_FAR = {
    "speed": 3.0,
    "latency": 2.0,
    "slowness": 1.0,
    "crowding": 0.5,
    "fixed": 2.0,
    "per_sample": 2.0,
    "hidden": 1.0,
    "bytes": 2.0,
}
_OWN_FAR, _BATCH_FAR = 0.3, 0.3


@dataclass(frozen=True, slots=True)
class ParamVector:
    """Where each parameter is in one flat vector."""

    names: tuple[str, ...]
    starts: dict[str, int]
    own: KeyIndex[tuple[int, int]]
    batch: KeyIndex[tuple[int, float]]
    expected: Floats
    far: Floats
    reach: Floats

    @classmethod
    def of(cls, steps: StepModel, figures: StepParams) -> ParamVector:
        """For the parameters of a layout's steps; their current values are the prior."""
        names = tuple(_FAR)
        sizes = [len(getattr(figures, name)) for name in names]
        *firsts, end = accumulate(sizes, initial=0)
        own = KeyIndex(steps.own_keys)
        batch = KeyIndex([key for key, count in Counter(steps.batch_keys).items() if count >= _OFTEN])
        expected = np.concatenate([getattr(figures, name) for name in names] + [np.zeros(len(own) + len(batch))])
        far = np.repeat([_FAR[name] for name in names], sizes)
        far = np.concatenate([far, np.full(len(own), _OWN_FAR), np.full(len(batch), _BATCH_FAR)])
        starts = dict(zip([*names, "own", "batch"], [*firsts, end, end + len(own)], strict=True))
        return cls(names, starts, own, batch, expected, far, figures.reach)

    def expect_alike(self, transferring: Ints, found: StepParams) -> None:
        """A training without observed transfers is expected to overlap as much as the others."""
        if len(transferring):
            first = self.starts["hidden"]
            self.expected[first : first + len(found.hidden)] = found.hidden[transferring].mean()

    def flat(self, figures: StepParams) -> Floats:
        own, batch = Lookup(list(self.own.places)), Lookup(list(self.batch.places))
        shared = [getattr(figures, name) for name in self.names]
        return np.concatenate([*shared, own(figures.own), batch(figures.batch)])

    def figures(self, row: Floats) -> StepParams:
        ends = [*list(self.starts.values())[1:], len(row)]
        parts = {name: row[first:end] for (name, first), end in zip(self.starts.items(), ends, strict=True)}
        own, batch = PerKeyParams(self.own, parts.pop("own")), PerKeyParams(self.batch, parts.pop("batch"))
        return StepParams(**parts, reach=self.reach, own=own, batch=batch)

    @property
    def num_shared(self) -> int:
        """How many leading parameters are shared by all trainings."""
        return self.starts["fixed"]

    def blocks(self) -> Ints:
        """[training, place]: positions of each training's own parameters; the vector's length where none."""
        mine = np.arange(self.starts["per_sample"] - self.starts["fixed"])  # trainings
        columns = [mine + self.starts[name] for name in ("fixed", "per_sample", "hidden", "bytes")]
        owners = [mine] * len(columns)
        for name, keyed in (("own", self.own.places), ("batch", self.batch.places)):
            columns.append(self.starts[name] + np.arange(len(keyed)))
            owners.append(np.array([training for training, _ in keyed], np.intp))
        column, owner = np.concatenate(columns), np.concatenate(owners)
        order = np.argsort(owner, kind="stable")
        counts = np.bincount(owner, minlength=len(mine))
        places = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        found = np.full((len(mine), counts.max(initial=0)), len(self.expected))
        found[owner[order], places] = column[order]
        return found


class ResidualGradients(NamedTuple):
    """Errors of members, and their derivatives by the parameters."""

    errors: Floats  # [member]
    shared: Floats  # [member, figure]: the first of the row
    columns: Ints  # [member, 6] of its training's own figures, the row's length where it has none such
    own: Floats  # [member, 6]


class Residuals:
    """Normalized errors of log step times, and their derivatives by the parameters.

    Interaction between members of a group is held fixed.
    """

    def __init__(self, steps: StepModel, sheet: ParamVector, met: Floats, measured: Floats) -> None:
        self.steps = steps
        self.sheet = sheet
        self._met = met
        self._measured = measured
        own, batch = sheet.own.places, sheet.batch.places
        nowhere = len(sheet.expected)
        at = [sheet.starts["batch"] + batch[key] if key in batch else nowhere for key in steps.batch_keys]
        self._batch: Ints = np.array(at, np.intp)  # [device]
        self._own: Ints = np.array([sheet.starts["own"] + own[key] for key in steps.own_keys], np.intp)

    def members(self, row: Floats) -> Floats:
        figures = self.sheet.figures(row)
        compute, _ = self.steps.compute(figures)
        return self._apart_from_measured(self.steps.total(figures, compute, self._met))

    def figures(self, row: Floats) -> Floats:
        return np.asarray((row - self.sheet.expected) / self.sheet.far)

    def slopes(self, row: Floats) -> ResidualGradients:
        """Derivatives of members' errors: sparse, so that the work is linear in members."""
        steps, figures = self.steps, self.sheet.figures(row)
        compute, slowest = steps.compute(figures)
        total, changes = steps.changes(figures, compute, self._met)
        kinds = steps.layout.device_kind[slowest][:, None] == np.arange(len(figures.slowness))
        shared = [changes.speed, changes.latency, kinds * changes.compute[:, None], changes.crowding]
        training = steps.training
        fixed = np.exp(figures.fixed[training])
        sampled = np.exp(figures.per_sample[training]) * steps.layout.device_samples[slowest]
        part, batch = fixed / (fixed + sampled), self._batch[slowest]
        own = {
            "fixed": changes.compute * part,
            "per_sample": changes.compute * (1.0 - part),
            "hidden": changes.hidden,
            "bytes": changes.bytes,
        }
        columns = [self.sheet.starts[name] + training for name in own] + [self._own[slowest], batch]
        numbers = [*own.values(), changes.compute, np.where(batch < len(row), changes.compute, 0.0)]
        return ResidualGradients(
            self._apart_from_measured(total),
            np.concatenate(shared, axis=1) / _ERROR,
            np.stack(columns, axis=1),
            np.stack(numbers, axis=1) / _ERROR,
        )

    def _apart_from_measured(self, total: Floats) -> Floats:
        return np.asarray((np.log(total) - self._measured) / _ERROR)


# Minimizes Σ √(1 + e²) − 1 over members and parameters, so large errors count about linearly, by damped Gauss-Newton
# steps (Levenberg, Marquardt) with weights 1/√(1 + e²). Trainings do not share their own parameters, so
#
# - `solve_own` lets all trainings step at once, each with its own damping, shared parameters fixed;
# - `solve` steps in the shared parameters, each training's own eliminated (Schur complement) and corrected after each
#   step by `solve_own` (after Golub and Pereyra's variable projection, 1973).
#
# The work is linear in the number of measurements.


_STEPS, _FIRST, _AFTER = 30, 20, 3  # at most: shared steps; own steps before these, and after each
_OWN = 12  # own steps alone; further ones would gain less than measurement noise
_GOOD, _GOOD_OWN = 1e-5, 1e-3  # the iteration ends after a step with a smaller relative gain
_DAMPED, _LESS, _MORE = 0.1, 0.2, 4.0  # on the diagonal: initial, after a successful step, after a failed one
_DAMPED_OWN, _LESS_OWN, _MORE_OWN = 1.0, 0.1, 3.0
_TRIES = 6  # dampings tried before giving up
_MAX_MOVE = 2.0  # of a parameter in one step, in logarithms


def solve(errors: Residuals, row: Floats) -> Floats:
    """The best vector near a given one."""
    own = _Own(errors)
    with one_thread(), np.errstate(all="ignore"):  # a step that goes too far is rejected
        row = own.solved(row, _FIRST)
        cost, damping = own.cost(row), _DAMPED
        for _ in range(_STEPS):
            bent = own.bent(row)
            for _ in range(_TRIES):
                moved = own.solved(bent.moved(row, damping, own.columns), _AFTER)
                if (now := own.cost(moved)) < cost:
                    break
                damping *= _MORE
            else:
                break
            saved = cost - now
            row, cost, damping = moved, now, damping * _LESS
            if saved < _GOOD * cost:
                break
    return row


def solve_own(errors: Residuals, row: Floats) -> Floats:
    """The same with the shared parameters fixed."""
    with one_thread(), np.errstate(all="ignore"):
        return _Own(errors).solved(row, _OWN)


class _Bent(NamedTuple):
    """Gradient and curvature of the whole error."""

    pull: Floats  # [shared]
    bend: Floats  # [shared, shared]
    own_pull: Floats  # [training, place]
    own_bend: Floats  # [training, place, place]
    between: Floats  # [training, place, shared]

    def moved(self, row: Floats, damping: float, columns: Ints) -> Floats:
        solved = np.linalg.solve(self.own_bend, np.concatenate([self.between, self.own_pull[:, :, None]], axis=2))
        followed, alone = solved[:, :, :-1], solved[:, :, -1]
        bend = self.bend - np.einsum("tps,tpr->sr", self.between, followed)
        pull = self.pull - np.einsum("tps,tp->s", self.between, alone)
        bend[np.diag_indices_from(bend)] *= 1.0 + damping
        shared = np.clip(np.linalg.solve(bend, -pull), -_MAX_MOVE, _MAX_MOVE)
        found = np.append(row, 0.0)
        found[: len(shared)] += shared
        found[columns] -= np.clip(alone + followed @ shared, -_MAX_MOVE, _MAX_MOVE)
        return found[:-1]


class _Own:
    """Ownership of parameters, and each training's own steps."""

    def __init__(self, errors: Residuals) -> None:
        self._errors = errors
        self.columns = errors.sheet.blocks()  # [training, place] in the row, its length where a training has fewer
        self._num, self._width = self.columns.shape
        length = len(errors.sheet.expected)
        self._place = np.zeros(length + 1, np.intp)  # [column] within its training
        self._place[self.columns] = np.arange(self._width)
        owner = np.full(length + 1, self._num)  # [column]: beyond the last where a figure is shared by all
        owner[self.columns] = np.arange(self._num)[:, None]
        self._owner = owner[:length]

    def cost(self, row: Floats) -> float:
        return float(_softened(self._errors.members(row)).sum() + _softened(self._errors.figures(row)).sum())

    def solved(self, row: Floats, steps: int) -> Floats:
        row, now = row.copy(), self._costs(row)
        damping, is_open = np.full(self._num, _DAMPED_OWN), np.ones(self._num, np.bool_)
        place = np.arange(self._width)
        for _ in range(steps):
            pull, bend = self._bent_alone(row, self._errors.slopes(row))
            bend[:, place, place] *= 1.0 + damping[:, None]
            moves = np.linalg.solve(bend[is_open], pull[is_open][:, :, None])[:, :, 0]
            moved = np.append(row, 0.0)
            moved[self.columns[is_open]] -= np.clip(moves, -_MAX_MOVE, _MAX_MOVE)
            costs = self._costs(moved[:-1])
            helps = costs < now
            row = np.where(np.append(helps, False)[self._owner], moved[:-1], row)
            is_open &= ~helps | (now - costs > _GOOD_OWN * now)
            now = np.minimum(now, costs)
            damping *= np.where(helps, _LESS_OWN, _MORE_OWN)
            if not is_open.any():
                break
        return row

    def bent(self, row: Floats) -> _Bent:
        found = self._errors.slopes(row)
        weights = _weights(found.errors)
        weighted = weights[:, None] * found.shared
        at, size = self._at(found), self._num * self._width
        between = [_summed(at, each[:, None] * found.own, size) for each in weighted.T]
        num_shared = self._errors.sheet.num_shared
        apart, per = self._errors.figures(row)[:num_shared], 1.0 / self._errors.sheet.far[:num_shared]
        return _Bent(
            weighted.T @ found.errors + _weights(apart) * apart * per,
            weighted.T @ found.shared + np.diag(_weights(apart) * per**2),
            *self._bent_alone(row, found),
            np.stack(between, axis=1).reshape(self._num, self._width, num_shared),
        )

    def _bent_alone(self, row: Floats, found: ResidualGradients) -> tuple[Floats, Floats]:
        """Gradient and curvature of each training alone: [training, place], [training, place, place]."""
        num, width = self._num, self._width
        at, places = self._at(found), self._place[found.columns]
        weighted = _weights(found.errors)[:, None] * found.own
        pull = _summed(at, weighted * found.errors[:, None], num * width).reshape(num, width)
        pairs, products = at[:, :, None] * width + places[:, None, :], weighted[:, :, None] * found.own[:, None, :]
        bend = _summed(pairs, products, num * width**2).reshape(num, width, width)
        apart = np.append(self._errors.figures(row), 0.0)
        per = np.append(1.0 / self._errors.sheet.far, 1.0)  # unowned positions do not move
        place = np.arange(width)
        bend[:, place, place] += (_weights(apart) * per**2)[self.columns]
        return np.asarray(pull + (_weights(apart) * apart * per)[self.columns]), bend

    def _at(self, found: ResidualGradients) -> Ints:
        """[member, own]: index among all trainings' own parameters."""
        return np.asarray(self._errors.steps.training[:, None] * self._width + self._place[found.columns])

    def _costs(self, row: Floats) -> Floats:
        """[training]: error of its members and its own parameters."""
        members = np.bincount(self._errors.steps.training, _softened(self._errors.members(row)), self._num)
        figures = np.bincount(self._owner, _softened(self._errors.figures(row)), self._num + 1)
        return np.asarray(members + figures[: self._num])


def _summed(places: Ints, numbers: Floats, length: int) -> Floats:
    return np.bincount(places.ravel(), numbers.ravel(), length).astype(np.float64)


def _softened(errors: Floats) -> Floats:
    return np.asarray(np.sqrt(1.0 + errors**2) - 1.0)


def _weights(errors: Floats) -> Floats:
    return np.asarray(1.0 / np.sqrt(1.0 + errors**2))


# Shared parameters are few, and hundreds of trainings determine them no better than dozens; so where there are many,
# some are fitted together (`reference_trainings`), then each of the others with the shared parameters fixed
# (`solve_own`).


_EACH = 24  # trainings that determine a link or device type well enough
_FITS = 3  # rounds of fitting and of interaction between members of a group


def fit(steps: StepModel, seconds: Floats, expected: StepParams) -> StepParams:
    """Fit the parameters of a layout to measured step times."""
    found = _started(steps, seconds, expected)
    found.reach = np.array([steps.spread.min(axis=0), steps.spread.max(axis=0)])  # no extrapolation beyond
    sheet = ParamVector.of(steps, found)
    for _ in range(_FITS):
        _, met = steps.met(found, steps.compute(found)[0])
        errors = Residuals(steps, sheet, met, np.log(seconds))
        found = sheet.figures(solve(errors, sheet.flat(found)))
        sheet.expect_alike(np.unique(steps.training[steps.layout.stage_member]), found)
    return found


def fit_trainings(steps: StepModel, seconds: Floats, expected: StepParams, known: StepParams) -> StepParams:
    """The same with the shared parameters of another fit."""
    found = _started(steps, seconds, expected)
    shared = {name: getattr(known, name) for name in ("speed", "latency", "slowness", "crowding", "reach")}
    found = replace(found, **shared, hidden=np.full(len(found.hidden), known.hidden.mean()))
    sheet = ParamVector.of(steps, found)
    for _ in range(_FITS if len(steps.layout.met_load) else 1):
        _, met = steps.met(found, steps.compute(found)[0])
        found = sheet.figures(solve_own(Residuals(steps, sheet, met, np.log(seconds)), sheet.flat(found)))
    return found


def reference_trainings(steps: StepModel) -> set[int]:
    """Trainings that determine all link and device types: for each type those seen most on it."""
    layout = steps.layout
    on_links = np.stack([steps.training[layout.stage_member[layout.load_stage]], layout.load_kind])
    on_devices = np.stack([steps.training[layout.device_member], layout.device_kind])
    found: set[int] = set()
    for seen in (on_links, on_devices):
        pairs, counts = np.unique(seen, axis=1, return_counts=True)
        for kind in np.unique(pairs[1]):
            there = pairs[1] == kind
            most = np.argsort(-counts[there], kind="stable")[:_EACH]
            found.update(pairs[0][there][most].tolist())
    return found


def _started(steps: StepModel, seconds: Floats, expected: StepParams) -> StepParams:
    """Initial guess: half of a training's fastest time is fixed, half per sample."""
    samples = steps.most_samples
    fixed, per_sample = expected.fixed.copy(), expected.per_sample.copy()
    for figure, measured in ((fixed, seconds), (per_sample, seconds / samples)):
        quickest = np.full(len(figure), np.inf)
        np.minimum.at(quickest, steps.training, measured)
        seen = np.isfinite(quickest)
        figure[seen] = np.log(0.5 * quickest[seen])
    return replace(expected, fixed=fixed, per_sample=per_sample)
