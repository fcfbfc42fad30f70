"""Links, devices and trainings are found again from steps, and what that takes grows with what was measured."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from carpool.core.model import Kind
from carpool.core.topology import Cluster
from carpool.predictors.links import fit as link_fit
from carpool.predictors.links.fabric import Fabric, representative_devices
from carpool.predictors.links.fit import ParamVector, Residuals, solve, solve_own
from carpool.predictors.links.layout import PlacedTraining, build_layout
from carpool.predictors.links.step_model import StepModel, StepParams

CLUSTER = Cluster.build([(2, 4, "V100"), (2, 4, "P100")])
FABRIC = Fabric.of(CLUSTER)
KINDS = ("V100", "P100")
PLACES = [("V100", 1), ("V100", 2), ("V100", 4), ("V100", 8), ("P100", 1), ("P100", 4)]


def runner(name: str, kind: str, width: int, input_bytes: float = 0.0) -> PlacedTraining:
    groups = ((Kind(kind), width),) if width <= 4 else ((Kind(kind), 4), (Kind(kind), width - 4))
    devices = representative_devices(CLUSTER, groups)
    assert devices is not None
    return PlacedTraining(name, devices, (kind,) * width, (64.0 / width,) * width, input_bytes=input_bytes)


def steps_of(trainings: int, places: list[tuple[str, int]] = PLACES, *, together: bool = False) -> StepModel:
    """Each training in all places; of those that share links, each second one waits for its input."""
    groups = []
    for kind, width in places:
        there = [runner(f"t{name}", kind, width, 1e9 * (name % 2) * together) for name in range(trainings)]
        groups += [there] if together else [[each] for each in there]
    layout = build_layout(FABRIC, KINDS, groups)
    return StepModel(layout, [int(each.model[1:]) for each in layout.runners])


def truth(trainings: int) -> StepParams:
    """Slower links than expected, and trainings of all sorts."""
    figures, numbers = StepParams.expected(FABRIC, len(KINDS), trainings), np.arange(trainings)
    return replace(
        figures,
        speed=figures.speed - 0.7,
        slowness=np.array([0.0, 0.6]),
        fixed=np.log(0.01) + 0.3 * (numbers % 4),
        per_sample=np.log(0.001) + 0.4 * (numbers % 3),
        bytes=figures.bytes + 0.5 * (numbers % 2),
    )


def errors_of(steps: StepModel, seconds: np.ndarray) -> tuple[Residuals, np.ndarray]:
    """What a fit begins with."""
    trainings = int(steps.training.max()) + 1
    figures = link_fit._started(steps, seconds, StepParams.expected(FABRIC, len(KINDS), trainings))
    figures.reach = np.array([steps.spread.min(axis=0), steps.spread.max(axis=0)])
    sheet = ParamVector.of(steps, figures)
    _, met = steps.met(figures, steps.compute(figures)[0])
    return Residuals(steps, sheet, met, np.log(seconds)), sheet.flat(figures)


def cost(errors: Residuals, row: np.ndarray) -> float:
    found = np.concatenate([errors.members(row), errors.figures(row)])
    return float((np.sqrt(1.0 + found**2) - 1.0).sum())


def seconds_of(steps: StepModel) -> np.ndarray:
    return steps.parts(truth(int(steps.training.max()) + 1))[2]


def test_twice_the_trainings_are_twice_the_numbers() -> None:
    sizes = []
    for count in (20, 40):
        steps = steps_of(count)
        errors, row = errors_of(steps, seconds_of(steps))
        sizes.append(sum(part.size for part in errors.slopes(row)))
    assert sizes[1] == 2 * sizes[0]


@pytest.mark.parametrize("together", [False, True])
def test_slopes_are_the_differences_of_the_errors(together: bool) -> None:
    steps = steps_of(3, together=together)
    errors, _ = errors_of(steps, seconds_of(steps))
    row = errors.sheet.flat(truth(3))
    found = errors.slopes(row)
    table = np.zeros((steps.layout.num_members, len(row) + 1))
    table[:, : found.shared.shape[1]] = found.shared
    np.add.at(table, (np.arange(len(table))[:, None], found.columns), found.own)
    assert found.errors == pytest.approx(errors.members(row))
    for column in range(len(row)):
        moved = row.copy()
        moved[column] += 1e-6
        differences = (errors.members(moved) - found.errors) / 1e-6
        assert table[:, column] == pytest.approx(differences, abs=1e-3)


def test_where_trainings_wait_for_their_input_only_that_matters() -> None:
    steps = steps_of(2, [("V100", 4)], together=True)
    compute, _ = steps.compute(truth(2))
    _, changes = steps.changes(truth(2), compute, np.ones(len(steps.layout.load_stage)))
    waits = np.array([each.input_bytes > 0.0 for each in steps.layout.runners])
    assert (changes.compute[waits] == 0.0).all()
    assert (changes.speed[waits] < 0.0).any(axis=1).all()


def test_what_was_measured_is_found_again() -> None:
    steps = steps_of(5)
    seconds = seconds_of(steps)
    found = link_fit.fit(steps, seconds, StepParams.expected(FABRIC, len(KINDS), 5))
    assert steps.parts(found)[2] == pytest.approx(seconds, rel=0.01)


def test_nothing_near_the_solution_is_better() -> None:
    steps = steps_of(4)
    rng = np.random.default_rng(0)
    errors, row = errors_of(steps, seconds_of(steps) * rng.lognormal(0.0, 0.1, steps.layout.num_members))
    found = solve(errors, row)
    assert cost(errors, found) < 0.5 * cost(errors, row)
    for step in rng.normal(0.0, 0.02, (200, len(row))):
        assert cost(errors, found + step) > 0.999 * cost(errors, found)


def test_own_figures_are_found_without_touching_the_shared_ones() -> None:
    steps = steps_of(4)
    errors, row = errors_of(steps, seconds_of(steps))
    found, num_shared = solve_own(errors, row), errors.sheet.num_shared
    assert (found[:num_shared] == row[:num_shared]).all()
    assert cost(errors, solve(errors, row)) <= cost(errors, found) < cost(errors, row)


def test_a_training_by_itself_comes_out_the_same_beside_others() -> None:
    steps, alone = steps_of(6), steps_of(1)
    known = truth(6)
    many = link_fit.fit_trainings(steps, seconds_of(steps), StepParams.expected(FABRIC, 2, 6), known)
    one = link_fit.fit_trainings(alone, seconds_of(alone), StepParams.expected(FABRIC, 2, 1), known)
    assert many.fixed[0] == pytest.approx(one.fixed[0], abs=1e-6)
    assert many.bytes[0] == pytest.approx(one.bytes[0], abs=1e-6)


def test_trainings_are_fitted_to_links_that_are_known() -> None:
    steps = steps_of(6)
    seconds = seconds_of(steps)
    found = link_fit.fit_trainings(steps, seconds, StepParams.expected(FABRIC, 2, 6), truth(6))
    assert (found.speed == truth(6).speed).all()
    assert steps.parts(found)[2] == pytest.approx(seconds, rel=0.03)


def test_few_trainings_all_tell_of_links_and_of_many_those_that_were_seen_most() -> None:
    assert link_fit.reference_trainings(steps_of(link_fit._EACH)) == set(range(link_fit._EACH))
    groups = [[runner(f"t{name}", "V100", width)] for name in range(100) for width in (1, 2)]
    groups += [[runner("t90", "V100", 4)], [runner("t91", "P100", 4)]]
    layout = build_layout(FABRIC, KINDS, groups)
    found = link_fit.reference_trainings(StepModel(layout, [int(each.model[1:]) for each in layout.runners]))
    assert {90, 91} <= found  # the most steps, and the only ones on a kind
    assert len(found) <= 2 * link_fit._EACH + 2
