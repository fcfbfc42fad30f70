"""Loss curves fitted online per training, and the work that remains to a target loss.

    l(k) = 1 / (b0·k + b1) + b2,   b0, b1, b2 ≥ 0

Peng et al., "Optimus", EuroSys 2018: stochastic gradient descent converges as O(1/k) towards a floor b2. Losses are
normalized by the current loss, steps by the last one, because jobs differ in both by orders of magnitude.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import exp, hypot, inf, isfinite, sqrt
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from carpool.core.errors import InputError
from carpool.core.estimates import Estimate
from carpool.core.model import JobId

Floats = NDArray[np.float64]

_FEWEST = 5  # points before a curve is used
_FLOORS = 16  # floors tried from 0 to the current loss (or the target), then again between the likely ones
_ROUNDS = 20  # of the damped Gauss-Newton iteration
_LEAST = 0.02  # of the largest loss: errors of smaller ones are not weighted more
_MIN_GAIN = 1e-3  # the iteration ends after a round with a smaller relative gain
_UNLIKELY = 1e-3  # of the likelihood of the best floor
_OUTLYING = 1.5  # residuals beyond this many standard deviations count less (Huber)
_MOST_SURE = 40.0  # points after which confidence stops growing: no training follows the formula exactly
_WIDEST = 1.0  # greatest spread of the logarithm of the remaining steps
_LATELY = 256  # raw points kept for recent declines


@dataclass(slots=True)
class LossCurve:
    """Learns one training's curve from (step, loss) pairs in bounded memory.

    Points are means of equal numbers of pairs; when there are `capacity` of them, neighbours are merged.
    """

    capacity: int = 64
    steps_: list[float] = field(default_factory=list)  # of the points, ascending
    losses_: list[float] = field(default_factory=list)
    stride_: int = 1  # pairs in one point
    open_: list[tuple[float, float]] = field(default_factory=list)  # pairs of the point that is not full yet
    lately_: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_LATELY))
    _answers: dict[tuple[float, int], tuple[int, Estimate]] = field(default_factory=dict, repr=False, compare=False)

    def fit(self, steps: ArrayLike, losses: ArrayLike) -> LossCurve:
        fresh = LossCurve(self.capacity)
        for step, loss in zip(np.asarray(steps, float), np.asarray(losses, float), strict=True):
            fresh.partial_fit(float(step), float(loss))
        for name in ("steps_", "losses_", "stride_", "open_", "lately_"):
            setattr(self, name, getattr(fresh, name))
        self._answers.clear()
        return self

    def partial_fit(self, step: float, loss: float) -> LossCurve:
        """Add one pair; repeated steps and NaN are ignored."""
        if not isfinite(loss) or (self.lately_ and step <= self.lately_[-1][0]):
            return self
        self.lately_.append((step, loss))
        self.open_.append((step, loss))
        if len(self.open_) == self.stride_:
            self._close()
        return self

    def _close(self) -> None:
        pairs = np.array(self.open_)
        self.open_.clear()
        self.steps_.append(float(pairs[:, 0].mean()))
        self.losses_.append(float(pairs[:, 1].mean()))
        if len(self.steps_) == self.capacity:
            self.steps_ = np.array(self.steps_).reshape(-1, 2).mean(axis=1).tolist()
            self.losses_ = np.array(self.losses_).reshape(-1, 2).mean(axis=1).tolist()
            self.stride_ *= 2

    @property
    def last_step(self) -> float:
        return self.lately_[-1][0] if self.lately_ else 0.0

    def decline(self, steps: float) -> float | None:
        """Decrease of the loss over the last `steps` steps; None before there are that many."""
        if not self.lately_:
            return None
        since = self.last_step - steps
        earlier = [loss for step, loss in self.lately_ if step <= since]
        return earlier[-1] - self.lately_[-1][1] if earlier else None

    def lately(self, steps: float) -> float:
        """The mean loss reported in the last `steps` steps."""
        since = self.last_step - steps
        return float(np.mean([loss for step, loss in self.lately_ if step > since]))

    def predict(self, steps: ArrayLike) -> Floats:
        b0, b1, b2 = self.params_
        return np.asarray(1.0 / (b0 * np.asarray(steps, float) + b1) + b2)

    @property
    def is_known(self) -> bool:
        return len(self.steps_) >= _FEWEST

    @property
    def params_(self) -> tuple[float, float, float]:
        """b0, b1 and b2 of the best fit."""
        assert self.is_known, f"a curve takes {_FEWEST} points, there are {len(self.steps_)}"
        fits = self._fits(_present(np.array(self.losses_)))
        best = int(fits.errors.argmin())
        return float(fits.b0[best]), float(fits.b1[best]), float(fits.floors[best])

    def remaining_to(self, target: float, window: int = 1) -> Estimate:
        """Steps from the last one until the mean loss of `window` steps first reaches a target.

        Every floor below the target has its own curve, weighted by its fit; the spread between them is the
        uncertainty, log-normal, since remaining steps may be many times more but not negative.
        """
        if not self.is_known:
            return Estimate(inf, inf)
        answered = self._answers.get((target, window))
        if answered is None or answered[0] != self._age:
            answered = self._answers[target, window] = self._age, self._remaining(target, window)
        left, spread = answered[1]
        return Estimate(max(0.0, left - self.last_step), spread)

    @property
    def _age(self) -> int:
        return len(self.steps_) * self.stride_

    def _remaining(self, target: float, window: int) -> Estimate:
        fits = self._fits(min(target, _present(np.array(self.losses_))))
        scatter = float(fits.scatter[fits.errors.argmin()])
        noise = scatter * sqrt(self.stride_ / window) * abs(target)  # of a window's mean
        now = self.steps_[-1]
        reached, jitter = _first_passage(fits, target, noise, window)
        left = np.maximum(reached - now, 1e-3 * now + 1e-3)
        weights = self._likelihood(fits)
        middle = float(weights @ np.log(left))
        sure = min(float(len(self.steps_)), _MOST_SURE)
        width = min(_WIDEST, sqrt(float(weights @ (np.log(left) - middle) ** 2) + 1.0 / sure**2))
        likely = exp(min(middle, 600.0))  # the median: floors just below the target would dominate the mean
        chance = min(float(weights @ np.minimum(jitter, left)), likely)
        return Estimate(now + likely, hypot(likely * sqrt(exp(width**2) - 1.0), chance))

    def _fits(self, ceiling: float) -> _Fits:
        """The best curve for each floor from 0 (lower for negative losses) to a ceiling."""
        steps, losses = np.array(self.steps_), np.array(self.losses_)
        lowest = 0.0 if losses.min() >= 0.0 and ceiling > 0.0 else min(ceiling, float(losses.min())) - np.ptp(losses)
        coarse = np.linspace(lowest, ceiling, _FLOORS, endpoint=False)
        likelihood = self._likelihood(_fit_each(steps, losses, coarse))
        likely = coarse[likelihood > _UNLIKELY * likelihood.max()]
        apart = (ceiling - lowest) / _FLOORS
        fine = np.linspace(
            max(lowest, likely[0] - apart), min(ceiling, likely[-1] + apart), 2 * _FLOORS, endpoint=False
        )
        return _fit_each(steps, losses, fine)

    def _likelihood(self, fits: _Fits) -> Floats:
        """Weight of each floor; they sum to 1."""
        sure = min(float(len(self.steps_)), _MOST_SURE)
        weights = (fits.errors.min() / fits.errors) ** (0.5 * sure)
        return np.asarray(weights / weights.sum())

    def state(self) -> dict[str, Any]:
        return {
            "capacity": self.capacity,
            "steps": self.steps_,
            "losses": self.losses_,
            "stride": self.stride_,
            "open": [list(pair) for pair in self.open_],
            "lately": [list(pair) for pair in self.lately_],
        }

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> LossCurve:
        curve = cls(state["capacity"], list(state["steps"]), list(state["losses"]), state["stride"])
        curve.open_ = _pairs(state["open"])
        curve.lately_.extend(_pairs(state["lately"]))
        return curve


class _Fits(NamedTuple):
    """One curve for each of several floors, and its relative errors."""

    floors: Floats
    b0: Floats
    b1: Floats
    errors: Floats  # mean of their squares, outlying ones weighted
    scatter: Floats  # standard deviation without outliers


def _first_passage(fits: _Fits, target: float, noise: float, window: int) -> tuple[Floats, Floats]:
    """The step at which a noisy mean over `window` steps first reaches a target, and its variation.

    That is before the curve does: while the curve falls by one standard deviation σ of that mean, in τ steps,
    τ/window means are drawn, and the lowest lies about Φ⁻¹(window/2τ)·σ below the curve; it varies by about τ/2.
    """
    height = np.maximum(target - fits.floors, 1e-9)
    slowness = np.maximum(noise / (fits.b0 * height**2), 1e-6)  # τ: the curve's slope is −b0·(l − b2)²
    depth = [-NormalDist().inv_cdf(min(0.5, max(1e-6, 0.5 * window / tau))) for tau in slowness]
    steps = (1.0 / (height + noise * np.array(depth)) - fits.b1) / fits.b0
    return np.asarray(steps), 0.5 * slowness


def _fit_each(steps: Floats, losses: Floats, floors: Floats) -> _Fits:
    """Damped Gauss-Newton in log b0 and log b1 for all floors at once, with Huber weights.

    Errors are relative to the loss, as its noise is roughly proportional to it.
    """
    step_unit, loss_unit = float(steps[-1]) or 1.0, max(float(np.abs(losses).max()), 1e-12)
    k, observed, floor = steps / step_unit, losses / loss_unit, (floors / loss_unit)[:, None]
    # The loss above the floor, at the start and now.
    tops = np.maximum(np.array([observed[:3].mean(), _present(observed)]) - floor, 1e-3)
    first = 1.0 / tops[:, :1]
    slope = np.maximum((1.0 / tops[:, 1:] - first) / max(float(k[-1] - k[0]), 1e-9), 1e-3)
    level = np.maximum(np.convolve(np.pad(np.abs(observed), 2, "edge"), np.full(5, 0.2), "valid"), _LEAST)
    logs = np.log(np.concatenate([slope, np.maximum(first - slope * k[0], 1e-3)], axis=1))
    best = _Line.at(k, observed - floor, logs, level)
    damping = np.full(len(floors), 1e-2)
    for _ in range(_ROUNDS):
        tried = _Line.at(k, observed - floor, best.logs + np.clip(best.step(damping), -1.0, 1.0), level)
        is_better = tried.errors < best.errors
        gained = float(((best.errors - tried.errors) / best.errors).max())
        best = best.where(is_better, tried)
        damping = np.clip(np.where(is_better, damping / 4.0, damping * 8.0), 1e-9, 1e6)
        if 0.0 <= gained < _MIN_GAIN:
            break
    b0, b1 = np.exp(best.logs).T / loss_unit
    return _Fits(floors, b0 / step_unit, b1, best.errors, best.scatter)


class _Line(NamedTuple):
    """Curves for given log b0 and log b1, one per row, and their derivatives."""

    logs: Floats
    gaps: Floats  # residuals of the curves
    by_b0: Floats  # slopes by log b0
    by_b1: Floats
    weights: Floats  # of each point
    errors: Floats  # mean weighted square of the gaps
    scatter: Floats  # robust standard deviation of them

    @classmethod
    def at(cls, k: Floats, above: Floats, logs: Floats, level: Floats) -> _Line:
        b0, b1 = np.exp(logs)[:, :1], np.exp(logs)[:, 1:]
        height = 1.0 / (b0 * k + b1)
        gaps = (above - height) / level
        sizes = np.abs(gaps)
        scatter = 1.4826 * np.median(sizes, axis=1) + 1e-9
        weights = np.minimum(1.0, _OUTLYING * scatter[:, None] / np.maximum(sizes, 1e-12))
        steepness = -(height**2) / level
        errors = np.maximum((weights * gaps**2).mean(axis=1), 1e-12)
        return cls(logs, gaps, b0 * k * steepness, b1 * steepness, weights, errors, scatter)

    def where(self, is_other: NDArray[np.bool_], other: _Line) -> _Line:
        pairs = zip(self, other, strict=True)
        return _Line._make([np.where(is_other if a.ndim == 1 else is_other[:, None], b, a) for a, b in pairs])

    def step(self, damping: Floats) -> Floats:
        left, right = self.weights * self.by_b0, self.weights * self.by_b1
        a, b, c = ((x * y).sum(axis=1) for x, y in ((left, self.by_b0), (left, self.by_b1), (right, self.by_b1)))
        u, v = (left * self.gaps).sum(axis=1), (right * self.gaps).sum(axis=1)
        a, c = a * (1.0 + damping) + 1e-12, c * (1.0 + damping) + 1e-12
        size = np.maximum(a * c - b * b, 1e-24)
        return np.stack([(c * u - b * v) / size, (a * v - b * u) / size], axis=1)


def _present(losses: Floats) -> float:
    """The current loss: the median of the last few points."""
    return float(np.median(losses[-5:]))


def _pairs(rows: Iterable[Iterable[float]]) -> list[tuple[float, float]]:
    return [(float(step), float(loss)) for step, loss in rows]


_SCHEMA = 1


class LossTarget(NamedTuple):
    """A job ends when the mean loss of its last `window` steps is at most `loss`."""

    loss: float
    window: int = 10


class LossCurves:
    """One loss curve per job that reports losses, and the target losses.

    Not an estimator: it knows no rates. Estimators own one.
    """

    def __init__(self) -> None:
        self.version = 0
        self._curves: dict[JobId, LossCurve] = {}
        self._aims: dict[JobId, LossTarget] = {}

    def aim(self, job: JobId, aim: LossTarget) -> None:
        if self._aims.get(job) != aim:
            self._aims[job] = aim
            self.version += 1

    def learn(self, job: JobId, step: float, loss: float | None) -> None:
        if loss is not None:
            self._curves.setdefault(job, LossCurve()).partial_fit(step, loss)
            self.version += 1

    def forget(self, job: JobId) -> None:
        self._curves.pop(job, None)
        self._aims.pop(job, None)

    def remaining(self, job: JobId, done: float) -> Estimate | None:
        """Steps from `done` to the job's target; None without one, or with too few reports."""
        curve, aim = self._curves.get(job), self._aims.get(job)
        if curve is None or aim is None or not curve.is_known:
            return None
        left = curve.remaining_to(aim.loss, aim.window)
        return Estimate(max(0.0, left.mean - max(0.0, done - curve.last_step)), left.std)

    def learning(self, job: JobId, steps: float) -> tuple[float, float] | None:
        """How far the loss fell in the last `steps` steps, and its mean in the last tenth; None: too few reports."""
        curve = self._curves.get(job)
        fall = None if curve is None else curve.decline(steps)
        return None if curve is None or fall is None else (fall, curve.lately(0.1 * steps))

    def totals(self) -> list[float]:
        """Known lengths of jobs, in steps."""
        totals: list[float] = []
        for job, curve in self._curves.items():
            left = self.remaining(job, curve.last_step)
            if left is not None:
                totals.append(curve.last_step + left.mean)
        return totals

    def save(self, path: Path) -> None:
        curves = {job: curve.state() for job, curve in self._curves.items()}
        document = {"schema": _SCHEMA, "curves": curves, "aims": self._aims}
        path.write_text(json.dumps(document) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> LossCurves:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document.get("schema", 0) > _SCHEMA:
            raise InputError(
                f"has schema {document['schema']}; this version reads up to {_SCHEMA}",
                where=str(path),
                way_out="Read it with the version that wrote it.",
            )
        found = cls()
        found._curves = {JobId(job): LossCurve.restored(state) for job, state in document["curves"].items()}
        found._aims = {JobId(job): LossTarget(*aim) for job, aim in document["aims"].items()}
        return found
