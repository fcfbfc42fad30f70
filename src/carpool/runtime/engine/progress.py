"""Training progress: losses, metrics, best evaluation, stop reason, and detection of divergence."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any

from carpool.runtime.data.sampler import Cursor, Draw
from carpool.runtime.engine.flat_buffers import Contribution, FlatLayout, StepSums
from carpool.runtime.engine.forward_backward import Step
from carpool.runtime.engine.optimizer_step import LossScale
from carpool.runtime.engine.stop_criteria import Best, BestSoFar
from carpool.runtime.engine.training import Training
from carpool.runtime.errors import Diverged

_ADVICE = "Try a lower learning rate or clip_norm."


class Progress:
    """Losses and metrics so far, checked against the training's stop condition."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self.losses: deque[float] = deque(maxlen=training.stop.window)
        self.metrics: dict[str, float] = {}
        self.best: BestSoFar | None = None
        self.evaluation_due = False
        self._metrics_stop_reason = ""

    def record_step(self, draw: Draw, loss: float) -> None:
        self.losses.append(loss)
        self.evaluation_due = self._is_evaluated(draw, self.losses)

    def ends_with_update(self, draw: Draw, loss: float) -> bool:
        """Whether no user code runs between the update of a step with this loss and the next step."""
        has_hooks = self._training.schedule is not None or self._training.after_update is not None
        return not has_hooks and not self._is_evaluated(draw, [*self.losses, loss])

    def record_metrics(self, step: int, metrics: Mapping[str, float]) -> bool:
        self.metrics = dict(metrics)
        self.evaluation_due = False
        self._metrics_stop_reason = self._training.stop.by_metrics(metrics)
        if not self._training.best:
            return False
        best = Best.parse(self._training.best)
        if not best.beats(metrics, None if self.best is None else self.best.value):
            return False
        self.best = BestSoFar(step, metrics[best.metric])
        return True

    def stop_reason(self, cursor: Cursor) -> str:
        if self.evaluation_due:
            return ""
        return self._metrics_stop_reason or self._progress_stop_reason(cursor, self.losses)

    def state_dict(self) -> dict[str, Any]:
        return {
            "losses": list(self.losses),
            "metrics": dict(self.metrics),
            "best": None if self.best is None else asdict(self.best),
            "evaluation_due": self.evaluation_due,
            "reached": self._metrics_stop_reason,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.losses = deque(state["losses"], maxlen=self._training.stop.window)
        self.metrics = dict(state["metrics"])
        self.best = None if state["best"] is None else BestSoFar(**state["best"])
        self.evaluation_due = state["evaluation_due"]
        self._metrics_stop_reason = state["reached"]

    def _is_evaluated(self, draw: Draw, losses: Collection[float]) -> bool:
        if self._training.evaluate is None:
            return False
        at_epoch = draw.ends_epoch and draw.after.epoch % self._training.evaluate_every == 0
        return at_epoch or bool(self._progress_stop_reason(draw.after, losses))

    def _progress_stop_reason(self, cursor: Cursor, losses: Collection[float]) -> str:
        return self._training.stop.by_progress(cursor.step, cursor.epoch, losses)


def read_finite_sums(
    step: Step, total: Contribution, layout: FlatLayout, scale: LossScale | None, progress: Progress
) -> StepSums:
    """Read a step's sum; `Diverged` if the loss is not finite, or a gradient at a loss scale of at most 1."""
    sums = layout.read_sums(total.values)
    if not math.isfinite(sums.loss):
        raise divergence_error(step, sums.loss, progress)
    if not sums.finite and (scale is None or scale.value <= 1.0):
        named = zip(layout.names, layout.gradient_views(total.values), strict=True)
        broken = next((name for name, view in named if not view.isfinite().all()), "all together")
        raise Diverged(
            f"{_position(step)}: the gradient of {broken!r} is not finite; the loss is {sums.loss:.6g}. {_ADVICE}"
        )
    return sums


def divergence_error(step: Step, loss: float, progress: Progress) -> Diverged:
    """The error for a loss that is not finite."""
    recent = ", ".join(f"{loss:.4g}" for loss in list(progress.losses)[-3:])
    before = f"; the losses before were {recent}" if recent else ""
    return Diverged(f"{_position(step)}: the loss is {loss}{before}. {_ADVICE}")


def _position(step: Step) -> str:
    return f"step {step.number + 1}, epoch {step.draw.at.epoch + 1}"
