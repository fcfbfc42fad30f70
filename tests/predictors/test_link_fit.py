"""What a fit of links and trainings works on grows with what was measured, not with its square."""

from __future__ import annotations

import numpy as np
import pytest

from carpool.core.model import Kind
from carpool.core.topology import Cluster
from carpool.predictors import link_fit
from carpool.predictors.fabric import Fabric, stand_ins
from carpool.predictors.layout import Runner, lay_out
from carpool.predictors.link_speeds import Figures, Steps

CLUSTER, KIND = Cluster.build([(2, 4, "V100")]), Kind("V100")
FABRIC = Fabric.of(CLUSTER)
WIDTHS = (1, 2, 4)


def measured(trainings: int) -> tuple[Steps, np.ndarray]:
    """Each training on three numbers of devices."""
    groups = []
    for name in range(trainings):
        for width in WIDTHS:
            devices = stand_ins(CLUSTER, ((KIND, width),))
            assert devices is not None
            groups.append([Runner(f"t{name}", devices, ("V100",) * width, (64.0 / width,) * width)])
    numbers = np.repeat(np.arange(trainings), len(WIDTHS))
    seconds = (0.01 + 0.09 / np.tile(WIDTHS, trainings)) * (1.0 + numbers % 3)
    return Steps(lay_out(FABRIC, ["V100"], groups), numbers.tolist()), seconds


def expected(trainings: int) -> Figures:
    return Figures.expected(FABRIC, 1, trainings)


class Seen:
    """Stands in for the solver, and looks at what it would work on."""

    def __init__(self, fit: link_fit._Fit, row: np.ndarray) -> None:
        self.slopes, self.errors, self.fit, self.row = fit.slopes(row), fit.errors(row), fit, row


def looked_at(trainings: int) -> Seen:
    steps, seconds = measured(trainings)
    figures = link_fit._started(steps, seconds, expected(trainings))
    figures.reach = np.array([steps.spread.min(axis=0), steps.spread.max(axis=0)])
    sheet = link_fit._Sheet.of(steps, figures)
    _, met = steps.met(figures, steps.compute(figures)[0])
    return Seen(link_fit._Fit(steps, sheet, figures, met, np.log(seconds)), sheet.flat(figures))


def test_twice_the_trainings_are_twice_the_numbers() -> None:
    few, many = (looked_at(count).slopes.nnz for count in (20, 40))
    assert many <= 2 * few


def test_slopes_are_the_differences_of_the_errors() -> None:
    seen = looked_at(3)
    table = seen.slopes.toarray()
    for column in range(len(seen.row)):
        moved = seen.row.copy()
        moved[column] += 1e-4
        differences = (seen.fit.errors(moved) - seen.errors) / 1e-4
        assert table[:, column] == pytest.approx(differences, abs=0.05 * max(1.0, float(np.abs(differences).max())))


def test_what_was_measured_is_found_again() -> None:
    steps, seconds = measured(5)
    found = link_fit.fit(steps, seconds, expected(5))
    assert steps.parts(found)[2] == pytest.approx(seconds, rel=0.05)
