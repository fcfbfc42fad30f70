"""Stop criteria and best-evaluation rules: conditions on steps, epochs, losses and metrics; pure."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from carpool.core.errors import InputError, UnknownName
from carpool.core.typed_fields import MAX_INT, shown

_GOAL = re.compile(r"\s*(?P<metric>[^<>=]*[^<>=\s])\s*(?P<sign>>=|<=)\s*(?P<value>\S+)\s*")


_MAX_WINDOW = 100_000  # losses that are kept and checkpointed


def as_whole(value: Any) -> Any:
    """An integer of NumPy or torch as one of Python; any other value unchanged."""
    if type(value) is int or isinstance(value, bool) or "bool" in str(getattr(value, "dtype", "")):
        return value
    try:
        return operator.index(value)
    except TypeError:
        return value


@dataclass(frozen=True, slots=True)
class Stop:
    """When a training ends: as soon as one of these conditions holds.

    Args:
        epochs: This many passes over the dataset are done.
        steps: This many steps are done.
        target_loss: The mean loss of the last ``window`` steps is at most this.
        window: Steps in the mean that is compared with ``target_loss``.
        target_metric: A metric of ``evaluate`` satisfies a condition, such as ``"accuracy >= 0.97"``.
        patience: This many evaluations in a row did not improve on the best one, by the rule in ``Training(best=…)``.
    """

    epochs: int | None = None
    steps: int | None = None
    target_loss: float | None = None
    window: int = 10
    target_metric: str = ""
    patience: int | None = None

    def __post_init__(self) -> None:
        if not self.target_metric and {self.epochs, self.steps, self.target_loss, self.patience} == {None}:
            raise InputError(
                "Stop() has no condition",
                way_out="Set one or more of epochs, steps, target_loss, target_metric, patience: Stop(epochs=20).",
            )
        for name in ("epochs", "steps", "window", "patience"):
            value = as_whole(getattr(self, name))
            object.__setattr__(self, name, value)
            if value is not None and (type(value) is not int or not 1 <= value <= MAX_INT):
                raise InputError(f"Stop({name}={shown(value)}); it must be a whole number from 1 to 2**53")
        if self.window > _MAX_WINDOW:
            raise InputError(f"Stop(window={self.window}); it must be at most {_MAX_WINDOW} steps")
        if self.target_loss is not None and not _is_finite(self.target_loss):
            raise InputError(f"Stop(target_loss={shown(self.target_loss)}); it must be a finite number")
        if self.target_metric:
            MetricGoal.parse(self.target_metric)

    def most_steps(self, steps_per_epoch: int | None) -> int | None:
        """The maximum number of steps, at most 2**53; None if only a target or the data ends the training."""
        limits = [] if self.steps is None else [self.steps]
        if self.epochs is not None and steps_per_epoch is not None:
            limits.append(min(self.epochs * steps_per_epoch, MAX_INT))
        return min(limits, default=None)

    def by_progress(self, steps: int, epochs: int, losses: Collection[float]) -> str:
        """The stop reason at this point of training; empty while no condition holds."""
        if self.epochs is not None and epochs >= self.epochs:
            return f"reached {self.epochs} epoch{'s' * (self.epochs > 1)}"
        if self.steps is not None and steps >= self.steps:
            return f"reached {self.steps} step{'s' * (self.steps > 1)}"
        if self.target_loss is not None and len(losses) >= self.window:
            mean = math.fsum(list(losses)[-self.window :]) / self.window
            if mean <= self.target_loss:
                return f"mean loss of the last {self.window} steps is {mean:.6g}, target {self.target_loss:g}"
        return ""

    def by_patience(self, evaluations: int) -> str:
        """The stop reason after `evaluations` evaluations without an improvement."""
        if self.patience is None or evaluations < self.patience:
            return ""
        return f"no improvement in {evaluations} evaluations, patience {self.patience}"

    def by_metrics(self, metrics: Mapping[str, float]) -> str:
        if not self.target_metric:
            return ""
        goal = MetricGoal.parse(self.target_metric)
        value = metric(metrics, goal.metric)
        return f"{goal.metric} is {value:.6g}, target {self.target_metric}" if goal.met_by(value) else ""


def _is_finite(value: object) -> bool:
    try:
        return math.isfinite(value)  # type: ignore[arg-type]
    except (TypeError, OverflowError):
        return False


@dataclass(frozen=True, slots=True)
class MetricGoal:
    """A condition on a metric, written ``"accuracy >= 0.97"`` or ``"perplexity <= 20"``."""

    metric: str
    at_least: bool
    value: float

    @classmethod
    def parse(cls, text: str) -> MetricGoal:
        found = _GOAL.fullmatch(text)
        try:
            if found:
                return cls(found["metric"], found["sign"] == ">=", float(found["value"]))
        except ValueError:
            pass
        raise InputError(f"target_metric {text!r} is not a condition", way_out="Write for example 'accuracy >= 0.97'.")

    def met_by(self, value: float) -> bool:
        return value >= self.value if self.at_least else value <= self.value


@dataclass(frozen=True, slots=True)
class Best:
    """Rule for the best evaluation, written ``"max accuracy"`` or ``"min loss"``."""

    metric: str
    larger: bool

    @classmethod
    def parse(cls, text: str) -> Best:
        side, _, name = text.strip().partition(" ")
        if side not in {"max", "min"} or not name.strip():
            raise InputError(f"best is {text!r}", way_out="Write for example 'max accuracy' or 'min loss'.")
        return cls(name.strip(), side == "max")

    def beats(self, metrics: Mapping[str, float], before: float | None) -> bool:
        """Whether these metrics improve on the best value so far; NaN never does."""
        value = metric(metrics, self.metric)
        if math.isnan(value):
            return False
        return before is None or (value > before if self.larger else value < before)


@dataclass(frozen=True, slots=True)
class BestSoFar:
    """The best evaluation so far."""

    step: int
    value: float


def metric(metrics: Mapping[str, float], name: str) -> float:
    """Look up a metric by name."""
    if name not in metrics:
        raise UnknownName("metric", name, metrics, where="evaluate")
    return metrics[name]
