"""Training progress: losses, metrics, best evaluation, stop reason, and detection of divergence."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from carpool.runtime.data.sampler import Cursor, Draw
from carpool.runtime.engine.flat_buffers import Contribution, FlatLayout, PendingLoss, StepSums
from carpool.runtime.engine.forward_backward import Step
from carpool.runtime.engine.optimizer_step import LossScale
from carpool.runtime.engine.stop_criteria import Best, BestSoFar
from carpool.runtime.engine.training import Training
from carpool.runtime.errors import Diverged

_ADVICE = "Try a lower learning rate or clip_norm."


class Progress:
    """Losses and metrics so far, checked against the training's stop condition.

    A pending loss is read when the next one is recorded, or by `settle` before the state is saved, evaluated or final.
    """

    def __init__(self, training: Training) -> None:
        self._training = training
        self.losses: deque[float] = deque(maxlen=training.stop.window)
        self.metrics: dict[str, float] = {}
        self.best: BestSoFar | None = None
        self.evaluation_due = False
        self._metrics_stop_reason = ""
        self._evaluations_since_best = 0
        self._epoch_losses = EpochLosses()
        self._pending: tuple[Draw, PendingLoss] | None = None

    @property
    def may_read_late(self) -> bool:
        """Whether the loss of a step can be read during the next one."""
        return self._training.stop.target_loss is None and self._training.on_step_end is None

    @property
    def last_loss(self) -> float:
        """The loss of the last step that was read."""
        return self.losses[-1] if self.losses else math.nan

    @property
    def epoch_loss(self) -> float:
        """The mean over the steps of the current epoch, or of the last one at its end."""
        return self._epoch_losses.total / max(self._epoch_losses.count, 1)

    def record_step(self, draw: Draw, loss: float | PendingLoss) -> None:
        self.settle()
        if isinstance(loss, PendingLoss):
            self._pending = draw, loss
        else:
            self._record_loss(draw, loss)
        self.evaluation_due = self._is_evaluated(draw, self.losses)
        if self.evaluation_due or draw.ends_epoch or self._progress_stop_reason(draw.after, self.losses):
            self.settle()

    def settle(self) -> None:
        """Read a pending loss; `Diverged` if it is not finite."""
        if self._pending is None:
            return
        (draw, pending), self._pending = self._pending, None
        loss = pending.value()
        if not math.isfinite(loss):
            self._pending = draw, pending  # the state stays unusable
            raise divergence_error(draw, loss, self)
        self._record_loss(draw, loss)

    def _record_loss(self, draw: Draw, loss: float) -> None:
        self.losses.append(loss)
        self._epoch_losses = self._epoch_losses.with_loss(draw.at.epoch, loss)

    def ends_with_update(self, draw: Draw, loss: float | PendingLoss) -> bool:
        """Whether no user code runs between the update of a step with this loss and the next step."""
        training = self._training
        hooks = (training.schedule, training.after_update, training.on_step_end)
        has_hooks = any(hook is not None for hook in hooks) or (draw.ends_epoch and training.on_epoch_end is not None)
        losses = self.losses if isinstance(loss, PendingLoss) else [*self.losses, loss]
        return not has_hooks and not self._is_evaluated(draw, losses)

    def record_metrics(self, step: int, metrics: Mapping[str, float]) -> bool:
        self.metrics = dict(metrics)
        self.evaluation_due = False
        self._metrics_stop_reason = self._training.stop.by_metrics(metrics)
        if not self._training.best:
            return False
        best = Best.parse(self._training.best)
        is_best = best.beats(metrics, None if self.best is None else self.best.value)
        self._evaluations_since_best = 0 if is_best else self._evaluations_since_best + 1
        if is_best:
            self.best = BestSoFar(step, metrics[best.metric])
        patience = self._training.stop.by_patience(self._evaluations_since_best)
        self._metrics_stop_reason = self._metrics_stop_reason or patience
        return is_best

    def stop_reason(self, cursor: Cursor) -> str:
        if self.evaluation_due:
            return ""
        return self._metrics_stop_reason or self._progress_stop_reason(cursor, self.losses)

    def state_dict(self) -> dict[str, Any]:
        self.settle()
        return {
            "losses": list(self.losses),
            "metrics": dict(self.metrics),
            "best": None if self.best is None else asdict(self.best),
            "evaluation_due": self.evaluation_due,
            "reached": self._metrics_stop_reason,
            "evaluations_since_best": self._evaluations_since_best,
            "epoch_losses": asdict(self._epoch_losses),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._pending = None
        self.losses = deque(state["losses"], maxlen=self._training.stop.window)
        self.metrics = dict(state["metrics"])
        self.best = None if state["best"] is None else BestSoFar(**state["best"])
        self.evaluation_due = state["evaluation_due"]
        self._metrics_stop_reason = state["reached"]
        self._evaluations_since_best = state.get("evaluations_since_best", 0)  # missing before version 0.2
        self._epoch_losses = EpochLosses(**state.get("epoch_losses", {}))

    def _is_evaluated(self, draw: Draw, losses: Collection[float]) -> bool:
        if self._training.evaluate is None:
            return False
        at_epoch = draw.ends_epoch and draw.after.epoch % self._training.evaluate_every == 0
        return at_epoch or bool(self._progress_stop_reason(draw.after, losses))

    def _progress_stop_reason(self, cursor: Cursor, losses: Collection[float]) -> str:
        return self._training.stop.by_progress(cursor.step, cursor.epoch, losses)


@dataclass(frozen=True, slots=True)
class EpochLosses:
    """The sum of the losses of an epoch's steps."""

    epoch: int = 0
    total: float = 0.0
    count: int = 0

    def with_loss(self, epoch: int, loss: float) -> EpochLosses:
        if epoch != self.epoch:
            return EpochLosses(epoch, loss, 1)
        return EpochLosses(epoch, self.total + loss, self.count + 1)


def read_finite_sums(
    step: Step, total: Contribution, layout: FlatLayout, scale: LossScale | None, progress: Progress
) -> StepSums:
    """Read a step's sum; `Diverged` if the loss is not finite, or a gradient at a loss scale of at most 1."""
    sums = layout.read_sums(total.values)
    assert isinstance(sums.loss, float)
    if not math.isfinite(sums.loss):
        raise divergence_error(step.draw, sums.loss, progress)
    if not sums.finite and (scale is None or scale.value <= 1.0):
        named = zip(layout.names, layout.gradient_views(total.values), strict=True)
        broken = next((name for name, view in named if not view.isfinite().all()), "all together")
        raise Diverged(
            f"{_position(step.draw)}: the gradient of {broken!r} is not finite; the loss is {sums.loss:.6g}. {_ADVICE}"
        )
    return sums


def divergence_error(draw: Draw, loss: float, progress: Progress) -> Diverged:
    """The error for a loss that is not finite."""
    recent = ", ".join(f"{loss:.4g}" for loss in list(progress.losses)[-3:])
    before = f"; the losses before were {recent}" if recent else ""
    return Diverged(f"{_position(draw)}: the loss is {loss}{before}. {_ADVICE}")


def _position(draw: Draw) -> str:
    return f"step {draw.at.step + 1}, epoch {draw.at.epoch + 1}"
