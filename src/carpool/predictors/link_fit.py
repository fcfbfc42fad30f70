"""Fits link speeds, device kinds and trainings to measured steps: all together, or trainings to what is known of links.

What all have in common depends on few figures, which hundreds of trainings tell no better than dozens; so where there
are many (`tellers`), some are fitted together, and then each of the others to what came out (`link_solver.solve_own`).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from carpool.predictors.layout import Floats
from carpool.predictors.link_errors import Errors, Sheet
from carpool.predictors.link_solver import solve, solve_own
from carpool.predictors.link_speeds import Figures, Steps

_EACH = 24  # trainings that are enough to know a kind of link, or of device
_FITS = 3  # rounds of fitting, and of what members of a group do to each other


def fit(steps: Steps, seconds: Floats, expected: Figures) -> Figures:
    """The figures under which the steps of a layout take the measured seconds, as far as they can."""
    found = _started(steps, seconds, expected)
    found.reach = np.array([steps.spread.min(axis=0), steps.spread.max(axis=0)])  # nothing is guessed beyond
    sheet = Sheet.of(steps, found)
    for _ in range(_FITS):
        _, met = steps.met(found, steps.compute(found)[0])
        errors = Errors(steps, sheet, met, np.log(seconds))
        found = sheet.figures(solve(errors, sheet.flat(found)))
        sheet.expect_alike(np.unique(steps.training[steps.layout.stage_member]), found)
    return found


def fit_trainings(steps: Steps, seconds: Floats, expected: Figures, known: Figures) -> Figures:
    """The same, but for what is not a training's alone: that is as another fit has found it."""
    found = _started(steps, seconds, expected)
    shared = {name: getattr(known, name) for name in ("speed", "latency", "slowness", "crowding", "reach")}
    found = replace(found, **shared, hidden=np.full(len(found.hidden), known.hidden.mean()))
    sheet = Sheet.of(steps, found)
    for _ in range(_FITS if len(steps.layout.met_load) else 1):
        _, met = steps.met(found, steps.compute(found)[0])
        found = sheet.figures(solve_own(Errors(steps, sheet, met, np.log(seconds)), sheet.flat(found)))
    return found


def tellers(steps: Steps) -> set[int]:
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
