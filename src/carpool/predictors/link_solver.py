"""Least squares of which few unknowns are shared by all equations, and the others are each one training's alone.

The error that is made small is Σ √(1 + e²) − 1 over members and figures: large ones count little more than linearly.
Steps are those of Gauss and Newton with the weights 1/√(1 + e²), damped (Levenberg, Marquardt). What is a training's
alone does not touch what is another's, so that

- `solve_own` lets all trainings take their steps at once, each with a damping of its own, what is shared held fixed;
- `solve` takes steps in what is shared, what is each training's alone eliminated (Schur's complement) and put right
  after each of them by `solve_own` (after Golub and Pereyra's variable projection, 1973).

The work is linear in what was measured.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from carpool.predictors.layout import Floats, Ints
from carpool.predictors.link_errors import Errors, Slopes
from carpool.predictors.one_thread import one_thread

_STEPS, _FIRST, _AFTER = 30, 20, 3  # at most: in what is shared; of each training's own before these, and after each
_OWN = 12  # of each training's own alone: what they still would save is little beside what steps differ by chance
_GOOD, _GOOD_OWN = 1e-5, 1e-3  # of the error that a step must save for another to be taken
_DAMPED, _LESS, _MORE = 0.1, 0.2, 4.0  # of the diagonal at first, after a step that helps, after one that does not
_DAMPED_OWN, _LESS_OWN, _MORE_OWN = 1.0, 0.1, 3.0
_TRIES = 6  # dampings that are tried before it is taken that nothing helps
_FAR = 2.0  # that a figure moves in one step, in logarithms


def solve(errors: Errors, row: Floats) -> Floats:
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


def solve_own(errors: Errors, row: Floats) -> Floats:
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
        shared = np.clip(np.linalg.solve(bend, -pull), -_FAR, _FAR)
        found = np.append(row, 0.0)
        found[: len(shared)] += shared
        found[columns] -= np.clip(alone + followed @ shared, -_FAR, _FAR)
        return found[:-1]


class _Own:
    """Which figures of a row are whose, and what each training makes of its own."""

    def __init__(self, errors: Errors) -> None:
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
            moved[self.columns[is_open]] -= np.clip(moves, -_FAR, _FAR)
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

    def _bent_alone(self, row: Floats, found: Slopes) -> tuple[Floats, Floats]:
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

    def _at(self, found: Slopes) -> Ints:
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
