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
_OFTEN = 3  # measured steps of a batch size before it has a figure of its own
# how far, in logarithms, figures may be from what is expected of them: first those that all trainings share
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
    """Where each figure stands in one long row."""

    names: tuple[str, ...]
    starts: dict[str, int]
    own: KeyIndex[tuple[int, int]]
    batch: KeyIndex[tuple[int, float]]
    expected: Floats
    far: Floats
    reach: Floats

    @classmethod
    def of(cls, steps: StepModel, figures: StepParams) -> ParamVector:
        """Of the figures that the steps of a layout depend on; what they are now is what is expected of them."""
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
        """A training of which no transfer was seen is expected to hide as much of them as the others do."""
        if len(transferring):
            first = self.starts["hidden"]
            self.expected[first : first + len(found.hidden)] = found.hidden[transferring].mean()

    def flat(self, figures: StepParams) -> Floats:
        """Figures as a row."""
        own, batch = Lookup(list(self.own.places)), Lookup(list(self.batch.places))
        shared = [getattr(figures, name) for name in self.names]
        return np.concatenate([*shared, own(figures.own), batch(figures.batch)])

    def figures(self, row: Floats) -> StepParams:
        """A row as figures."""
        ends = [*list(self.starts.values())[1:], len(row)]
        parts = {name: row[first:end] for (name, first), end in zip(self.starts.items(), ends, strict=True)}
        own, batch = PerKeyParams(self.own, parts.pop("own")), PerKeyParams(self.batch, parts.pop("batch"))
        return StepParams(**parts, reach=self.reach, own=own, batch=batch)

    @property
    def num_shared(self) -> int:
        """How many figures at the beginning of the row are shared by all trainings."""
        return self.starts["fixed"]

    def blocks(self) -> Ints:
        """[training, place]: where the figures that are a training's alone stand; the row's length where none is."""
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
    """Errors of members, and how they change with the figures that they depend on."""

    errors: Floats  # [member]
    shared: Floats  # [member, figure]: the first of the row
    columns: Ints  # [member, 6] of its training's own figures, the row's length where it has none such
    own: Floats  # [member, 6]


class Residuals:
    """Errors of the logarithm of step times, in usual ones, and how they change with each figure.

    What members of a group do to each other is held fixed meanwhile.
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
        """One for each member."""
        figures = self.sheet.figures(row)
        compute, _ = self.steps.compute(figures)
        return self._apart_from_measured(self.steps.total(figures, compute, self._met))

    def figures(self, row: Floats) -> Floats:
        """One for each figure that is not as expected."""
        return np.asarray((row - self.sheet.expected) / self.sheet.far)

    def slopes(self, row: Floats) -> ResidualGradients:
        """The derivatives of members' errors: each has few that are not 0, so that the work is linear in members."""
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


# The error that is made small is Σ √(1 + e²) − 1 over members and figures: large ones count little more than linearly.
# Steps are those of Gauss and Newton with the weights 1/√(1 + e²), damped (Levenberg, Marquardt). What is a training's
# alone does not touch what is another's, so that
#
# - `solve_own` lets all trainings take their steps at once, each with a damping of its own, what is shared held fixed;
# - `solve` takes steps in what is shared, what is each training's alone eliminated (Schur's complement) and put right
#   after each of them by `solve_own` (after Golub and Pereyra's variable projection, 1973).
#
# The work is linear in what was measured.


_STEPS, _FIRST, _AFTER = 30, 20, 3  # at most: in what is shared; of each training's own before these, and after each
_OWN = 12  # of each training's own alone: what they still would save is little beside what steps differ by chance
_GOOD, _GOOD_OWN = 1e-5, 1e-3  # of the error that a step must save for another to be taken
_DAMPED, _LESS, _MORE = 0.1, 0.2, 4.0  # of the diagonal at first, after a step that helps, after one that does not
_DAMPED_OWN, _LESS_OWN, _MORE_OWN = 1.0, 0.1, 3.0
_TRIES = 6  # dampings that are tried before it is taken that nothing helps
_MAX_MOVE = 2.0  # that a figure moves in one step, in logarithms


def solve(errors: Residuals, row: Floats) -> Floats:
    """The best row near another one."""
    own = _Own(errors)
    with one_thread(), np.errstate(all="ignore"):  # a step that goes too far is not kept
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
    """The same, with what is shared by all as it is."""
    with one_thread(), np.errstate(all="ignore"):
        return _Own(errors).solved(row, _OWN)


class _Bent(NamedTuple):
    """Slopes and curvature of the whole error at a row."""

    pull: Floats  # [shared]
    bend: Floats  # [shared, shared]
    own_pull: Floats  # [training, place]
    own_bend: Floats  # [training, place, place]
    between: Floats  # [training, place, shared]

    def moved(self, row: Floats, damping: float, columns: Ints) -> Floats:
        """The row after a step of everything, damped in what is shared."""
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
    """Which figures of a row are whose, and what each training makes of its own."""

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
        """The whole error."""
        return float(_softened(self._errors.members(row)).sum() + _softened(self._errors.figures(row)).sum())

    def solved(self, row: Floats, steps: int) -> Floats:
        """The row with each training's own figures nearer to their best."""
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
        """Slopes and curvature of everything."""
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
        """Slopes and curvature of each training by itself: [training, place], [training, place, place]."""
        num, width = self._num, self._width
        at, places = self._at(found), self._place[found.columns]
        weighted = _weights(found.errors)[:, None] * found.own
        pull = _summed(at, weighted * found.errors[:, None], num * width).reshape(num, width)
        pairs, products = at[:, :, None] * width + places[:, None, :], weighted[:, :, None] * found.own[:, None, :]
        bend = _summed(pairs, products, num * width**2).reshape(num, width, width)
        apart = np.append(self._errors.figures(row), 0.0)
        per = np.append(1.0 / self._errors.sheet.far, 1.0)  # what is nobody's figure stays where it is
        place = np.arange(width)
        bend[:, place, place] += (_weights(apart) * per**2)[self.columns]
        return np.asarray(pull + (_weights(apart) * apart * per)[self.columns]), bend

    def _at(self, found: ResidualGradients) -> Ints:
        """[member, own]: which of all trainings' figures."""
        return np.asarray(self._errors.steps.training[:, None] * self._width + self._place[found.columns])

    def _costs(self, row: Floats) -> Floats:
        """[training]: of its members and of its own figures."""
        members = np.bincount(self._errors.steps.training, _softened(self._errors.members(row)), self._num)
        figures = np.bincount(self._owner, _softened(self._errors.figures(row)), self._num + 1)
        return np.asarray(members + figures[: self._num])


def _summed(places: Ints, numbers: Floats, length: int) -> Floats:
    return np.bincount(places.ravel(), numbers.ravel(), length).astype(np.float64)


def _softened(errors: Floats) -> Floats:
    return np.asarray(np.sqrt(1.0 + errors**2) - 1.0)


def _weights(errors: Floats) -> Floats:
    return np.asarray(1.0 / np.sqrt(1.0 + errors**2))


# What all have in common depends on few figures, which hundreds of trainings tell no better than dozens; so where there
# are many (`tellers`), some are fitted together, and then each of the others to what came out (`link_solver.solve_own`).


_EACH = 24  # trainings that are enough to know a kind of link, or of device
_FITS = 3  # rounds of fitting, and of what members of a group do to each other


def fit(steps: StepModel, seconds: Floats, expected: StepParams) -> StepParams:
    """The figures under which the steps of a layout take the measured seconds, as far as they can."""
    found = _started(steps, seconds, expected)
    found.reach = np.array([steps.spread.min(axis=0), steps.spread.max(axis=0)])  # nothing is guessed beyond
    sheet = ParamVector.of(steps, found)
    for _ in range(_FITS):
        _, met = steps.met(found, steps.compute(found)[0])
        errors = Residuals(steps, sheet, met, np.log(seconds))
        found = sheet.figures(solve(errors, sheet.flat(found)))
        sheet.expect_alike(np.unique(steps.training[steps.layout.stage_member]), found)
    return found


def fit_trainings(steps: StepModel, seconds: Floats, expected: StepParams, known: StepParams) -> StepParams:
    """The same, but for what is not a training's alone: that is as another fit has found it."""
    found = _started(steps, seconds, expected)
    shared = {name: getattr(known, name) for name in ("speed", "latency", "slowness", "crowding", "reach")}
    found = replace(found, **shared, hidden=np.full(len(found.hidden), known.hidden.mean()))
    sheet = ParamVector.of(steps, found)
    for _ in range(_FITS if len(steps.layout.met_load) else 1):
        _, met = steps.met(found, steps.compute(found)[0])
        found = sheet.figures(solve_own(Residuals(steps, sheet, met, np.log(seconds)), sheet.flat(found)))
    return found


def reference_trainings(steps: StepModel) -> set[int]:
    """Trainings whose steps are enough to know all links and devices: of each kind those that were seen most on it."""
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
    """Half of a training's quickest measured time is taken for fixed, half for samples."""
    samples = steps.most_samples
    fixed, per_sample = expected.fixed.copy(), expected.per_sample.copy()
    for figure, measured in ((fixed, seconds), (per_sample, seconds / samples)):
        quickest = np.full(len(figure), np.inf)
        np.minimum.at(quickest, steps.training, measured)
        seen = np.isfinite(quickest)
        figure[seen] = np.log(0.5 * quickest[seen])
    return replace(expected, fixed=fixed, per_sample=per_sample)
