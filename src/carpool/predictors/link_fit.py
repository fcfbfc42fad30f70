"""Fits link speeds, device kinds and trainings to measured steps, all together."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares
from scipy.sparse import csr_array

from carpool.predictors.layout import Floats, Ints
from carpool.predictors.link_speeds import Figures, Steps
from carpool.predictors.one_thread import one_thread
from carpool.predictors.own_figures import Keyed, Lookup, OwnFigures

_ERROR = 0.05  # relative error of a measured step that counts as usual
_FITS = 3  # rounds of fitting, and of what members of a group do to each other
_STEP = 1e-4  # of a difference quotient, in logarithms
_NO_FIGURE = -1
_OFTEN = 3  # measured steps of a batch size before it has a figure of its own
# how far, in logarithms, figures may be from what is expected of them
_FAR = {
    "speed": 3.0,
    "latency": 2.0,
    "slowness": 1.0,
    "fixed": 2.0,
    "per_sample": 2.0,
    "hidden": 1.0,
    "crowding": 0.5,
    "bytes": 2.0,
}
_OWN_FAR, _BATCH_FAR = 0.3, 0.3


def fit(steps: Steps, seconds: Floats, expected: Figures) -> Figures:
    """The figures under which the steps of a layout take the measured seconds, as far as they can."""
    found = _started(steps, seconds, expected)
    found.reach = np.array([steps.spread.min(axis=0), steps.spread.max(axis=0)])  # nothing is guessed beyond
    sheet = _Sheet.of(steps, found)
    for _ in range(_FITS):
        _, met = steps.met(found, steps.compute(found)[0])
        fit = _Fit(steps, sheet, found, met, np.log(seconds))
        found = sheet.figures(fit.solved(sheet.flat(found)))
        sheet.expect_alike(np.unique(steps.training[steps.layout.stage_member]), found)
    return found


def _started(steps: Steps, seconds: Floats, expected: Figures) -> Figures:
    """Half of a training's quickest measured time is taken for fixed, half for samples."""
    samples = steps.most_samples
    fixed, per_sample = expected.fixed.copy(), expected.per_sample.copy()
    for figure, measured in ((fixed, seconds), (per_sample, seconds / samples)):
        quickest = np.full(len(figure), np.inf)
        np.minimum.at(quickest, steps.training, measured)
        seen = np.isfinite(quickest)
        figure[seen] = np.log(0.5 * quickest[seen])
    return replace(expected, fixed=fixed, per_sample=per_sample)


@dataclass(frozen=True, slots=True)
class _Sheet:
    """Where each figure stands in one long row."""

    names: tuple[str, ...]
    starts: dict[str, int]
    own: Keyed[tuple[int, int]]
    batch: Keyed[tuple[int, float]]
    expected: Floats
    far: Floats
    reach: Floats

    @classmethod
    def of(cls, steps: Steps, figures: Figures) -> _Sheet:
        names = tuple(_FAR)
        sizes = [len(getattr(figures, name)) for name in names]
        *firsts, end = accumulate(sizes, initial=0)
        own = Keyed(steps.own_keys)
        batch = Keyed([key for key, count in Counter(steps.batch_keys).items() if count >= _OFTEN])
        expected = np.concatenate([getattr(figures, name) for name in names] + [np.zeros(len(own) + len(batch))])
        far = np.repeat([_FAR[name] for name in names], sizes)
        far = np.concatenate([far, np.full(len(own), _OWN_FAR), np.full(len(batch), _BATCH_FAR)])
        starts = dict(zip([*names, "own", "batch"], [*firsts, end, end + len(own)], strict=True))
        return cls(names, starts, own, batch, expected, far, figures.reach)

    def expect_alike(self, transferring: Ints, found: Figures) -> None:
        """A training of which no transfer was seen is expected to hide as much of them as the others do."""
        if len(transferring):
            first = self.starts["hidden"]
            self.expected[first : first + len(found.hidden)] = found.hidden[transferring].mean()

    def flat(self, figures: Figures) -> Floats:
        """Figures as a row."""
        own, batch = Lookup(list(self.own.places)), Lookup(list(self.batch.places))
        shared = [getattr(figures, name) for name in self.names]
        return np.concatenate([*shared, own(figures.own), batch(figures.batch)])

    def figures(self, row: Floats) -> Figures:
        """A row as figures."""
        ends = [*list(self.starts.values())[1:], len(row)]
        parts = {name: row[first:end] for (name, first), end in zip(self.starts.items(), ends, strict=True)}
        own, batch = OwnFigures(self.own, parts.pop("own")), OwnFigures(self.batch, parts.pop("batch"))
        return Figures(**parts, reach=self.reach, own=own, batch=batch)


class _Fit:
    """Errors of the logarithm of step times, in usual ones, and how they change with each figure.

    What members of a group do to each other is held fixed meanwhile.
    """

    def __init__(self, steps: Steps, sheet: _Sheet, figures: Figures, met: Floats, measured: Floats) -> None:
        self._steps = steps
        self._sheet = sheet
        self._met = met
        self._measured = measured
        own, batch = sheet.own.places, sheet.batch.places
        self._own: Ints = np.array([own[key] for key in steps.own_keys], np.intp)  # [device]
        self._batch: Ints = np.array([batch.get(key, _NO_FIGURE) for key in steps.batch_keys], np.intp)

    def solved(self, row: Floats) -> Floats:
        """The best row there is near one.

        Figures are measured by what they change: otherwise an iterative solver stops far from where an exact one ends.
        """
        how: dict[str, Any] = {"loss": "soft_l1", "max_nfev": 40, "tr_solver": "lsmr", "x_scale": "jac"}
        with one_thread():
            best = least_squares(self.errors, row, self.slopes, **how)
        return np.asarray(best.x)

    def errors(self, row: Floats) -> Floats:
        """One for each member, then one for each figure that is not as expected."""
        figures = self._sheet.figures(row)
        compute, _ = self._steps.compute(figures)
        logs = np.log(self._steps.total(figures, compute, self._met))
        return np.concatenate([(logs - self._measured) / _ERROR, (row - self._sheet.expected) / self._sheet.far])

    def slopes(self, row: Floats) -> csr_array:
        """The errors' derivatives; a handful of differences is enough, as a step hangs on few figures.

        Kept sparse: a training has figures of its own, so that the whole table grows with the square of the trainings.
        """
        steps, sheet = self._steps, self._sheet
        figures = sheet.figures(row)
        compute, slowest = steps.compute(figures)
        now = np.log(steps.total(figures, compute, self._met))
        members = np.arange(len(now))
        found = _Slopes(members)

        def by(changed: Figures, seconds: Floats = compute) -> Floats:
            return np.asarray((np.log(steps.total(changed, seconds, self._met)) - now) / (_STEP * _ERROR))

        for name in ("speed", "latency", "crowding"):
            for place in range(len(getattr(figures, name))):
                found.add(sheet.starts[name] + place, by(figures.moved(name, place, _STEP)))
        for name in ("hidden", "bytes"):
            found.add(sheet.starts[name] + steps.training, by(figures.moved(name, slice(None), _STEP)))
        self._by_compute(found, by(figures, compute * np.exp(_STEP)), figures, slowest)
        return found.above(1.0 / sheet.far)

    def _by_compute(self, found: _Slopes, slope: Floats, figures: Figures, slowest: Ints) -> None:
        """Everything that acts through the seconds of computing of a member's slowest device."""
        steps, sheet = self._steps, self._sheet
        layout = steps.layout
        fixed = np.exp(figures.fixed[steps.training])
        samples = np.exp(figures.per_sample[steps.training]) * layout.device_samples[slowest]
        found.add(sheet.starts["fixed"] + steps.training, slope * fixed / (fixed + samples))
        found.add(sheet.starts["per_sample"] + steps.training, slope * samples / (fixed + samples))
        found.add(sheet.starts["slowness"] + layout.device_kind[slowest], slope)
        found.add(sheet.starts["own"] + self._own[slowest], slope)
        batch = self._batch[slowest]
        has = batch != _NO_FIGURE
        found.add(sheet.starts["batch"] + batch[has], slope[has], has)


class _Slopes:
    """Rows of members, columns of figures; only what is not zero by nature is kept."""

    def __init__(self, members: Ints) -> None:
        self._members = members
        self._rows: list[Ints] = []
        self._columns: list[Ints] = []
        self._numbers: list[Floats] = []

    def add(self, columns: Ints | int, numbers: Floats, of: NDArray[np.bool_] | slice = slice(None)) -> None:
        """How each member, or each of some, changes with one figure."""
        rows = self._members[of]
        self._rows.append(rows)
        self._columns.append(np.broadcast_to(columns, rows.shape))
        self._numbers.append(numbers)

    def above(self, diagonal: Floats) -> csr_array:
        """The table, with a diagonal below it: one row for each figure."""
        places = np.arange(len(diagonal))
        rows = np.concatenate([*self._rows, len(self._members) + places])
        columns = np.concatenate([*self._columns, places])
        shape = (len(self._members) + len(places), len(places))
        return csr_array((np.concatenate([*self._numbers, diagonal]), (rows, columns)), shape=shape)
