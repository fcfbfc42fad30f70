"""How far step times are from measured ones, in a row of all figures, and how that changes with each of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from carpool.predictors.layout import Floats, Ints
from carpool.predictors.link_speeds import Figures, Steps
from carpool.predictors.own_figures import Keyed, Lookup, OwnFigures

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
class Sheet:
    """Where each figure stands in one long row."""

    names: tuple[str, ...]
    starts: dict[str, int]
    own: Keyed[tuple[int, int]]
    batch: Keyed[tuple[int, float]]
    expected: Floats
    far: Floats
    reach: Floats

    @classmethod
    def of(cls, steps: Steps, figures: Figures) -> Sheet:
        """Of the figures that the steps of a layout depend on; what they are now is what is expected of them."""
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


class Slopes(NamedTuple):
    """Errors of members, and how they change with the figures that they depend on."""

    errors: Floats  # [member]
    shared: Floats  # [member, figure]: the first of the row
    columns: Ints  # [member, 6] of its training's own figures, the row's length where it has none such
    own: Floats  # [member, 6]


class Errors:
    """Errors of the logarithm of step times, in usual ones, and how they change with each figure.

    What members of a group do to each other is held fixed meanwhile.
    """

    def __init__(self, steps: Steps, sheet: Sheet, met: Floats, measured: Floats) -> None:
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

    def slopes(self, row: Floats) -> Slopes:
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
        return Slopes(
            self._apart_from_measured(total),
            np.concatenate(shared, axis=1) / _ERROR,
            np.stack(columns, axis=1),
            np.stack(numbers, axis=1) / _ERROR,
        )

    def _apart_from_measured(self, total: Floats) -> Floats:
        return np.asarray((np.log(total) - self._measured) / _ERROR)
