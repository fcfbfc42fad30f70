"""Stop criteria and best-evaluation rules: conditions on steps, epochs, losses and metrics; pure."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from carpool.core.errors import InputError, UnknownName

_GOAL = re.compile(r"\s*(?P<metric>[^<>=]*[^<>=\s])\s*(?P<sign>>=|<=)\s*(?P<value>\S+)\s*")


@dataclass(frozen=True, slots=True)
class Stop:
    """When a training ends: as soon as one of these conditions holds.

    ``target_loss``: the mean loss of the last ``window`` steps is at most this. ``target_metric``: a metric returned by
    ``evaluate`` satisfies a condition such as ``"accuracy >= 0.97"``.
    """

    epochs: int | None = None
    steps: int | None = None
    target_loss: float | None = None
    window: int = 10
    target_metric: str = ""

    def __post_init__(self) -> None:
        if self.epochs is None and self.steps is None and self.target_loss is None and not self.target_metric:
            raise InputError(
                "Stop() has no condition",
                way_out="Set one or more of epochs, steps, target_loss, target_metric: Stop(epochs=20).",
            )
        for name, value in (("epochs", self.epochs), ("steps", self.steps), ("window", self.window)):
            if value is not None and (type(value) is not int or value < 1):
                raise InputError(f"Stop({name}={value!r}); it must be a whole number of at least 1")
        if self.target_loss is not None and not math.isfinite(self.target_loss):
            raise InputError(f"Stop(target_loss={self.target_loss!r}); it must be a finite number")
        if self.target_metric:
            MetricGoal.parse(self.target_metric)

    def most_steps(self, steps_per_epoch: int) -> int | None:
        """The maximum number of steps; ``None`` if only a target ends the training."""
        limits = [] if self.steps is None else [self.steps]
        if self.epochs is not None:
            limits.append(self.epochs * steps_per_epoch)
        return min(limits, default=None)

    def by_progress(self, steps: int, epochs: int, losses: Collection[float]) -> str:
        """The stop reason at this point of training; empty while no condition holds."""
        if self.epochs is not None and epochs >= self.epochs:
            return f"reached {self.epochs} epochs"
        if self.steps is not None and steps >= self.steps:
            return f"reached {self.steps} steps"
        if self.target_loss is not None and len(losses) >= self.window:
            mean = math.fsum(list(losses)[-self.window :]) / self.window
            if mean <= self.target_loss:
                return f"mean loss of the last {self.window} steps is {mean:.6g}, target {self.target_loss:g}"
        return ""

    def by_metrics(self, metrics: Mapping[str, float]) -> str:
        if not self.target_metric:
            return ""
        goal = MetricGoal.parse(self.target_metric)
        value = metric(metrics, goal.metric)
        return f"{goal.metric} is {value:.6g}, target {self.target_metric}" if goal.met_by(value) else ""


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
