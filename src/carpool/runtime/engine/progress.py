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


class Progress:
    """What steps and evaluations have shown, held against what the training wants to reach."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self.losses: deque[float] = deque(maxlen=training.stop.window)
        self.metrics: dict[str, float] = {}
        self.best: BestSoFar | None = None
        self.evaluation_due = False
        self._reached = ""  # by metrics

    def stepped(self, draw: Draw, loss: float) -> None:
        """A step has been made; an evaluation is due where the training asks for one after it, and at the end."""
        self.losses.append(loss)
        self.evaluation_due = self._is_evaluated(draw, self.losses)

    def ends_with_update(self, draw: Draw, loss: float) -> bool:
        """Whether no code of the user's will come between the update of a step with this loss and the next step."""
        has_more = self._training.schedule is not None or self._training.after_update is not None
        return not has_more and not self._is_evaluated(draw, [*self.losses, loss])

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Take the metrics of a step; whether they are the best so far."""
        self.metrics = dict(metrics)
        self.evaluation_due = False
        self._reached = self._training.stop.by_metrics(metrics)
        if not self._training.best:
            return False
        best = Best.parse(self._training.best)
        if not best.beats(metrics, None if self.best is None else self.best.value):
            return False
        self.best = BestSoFar(step, metrics[best.metric])
        return True

    def why_over(self, cursor: Cursor) -> str:
        """Why a training that stands here is over, in words; empty while it is not."""
        return "" if self.evaluation_due else self._reached or self._over_by_steps(cursor, self.losses)

    @property
    def lately(self) -> str:
        """The last few losses, in words; empty before the first."""
        return ", ".join(f"{loss:.4g}" for loss in list(self.losses)[-3:])

    def state_dict(self) -> dict[str, Any]:
        """All that resuming needs."""
        return {
            "losses": list(self.losses),
            "metrics": dict(self.metrics),
            "best": None if self.best is None else asdict(self.best),
            "evaluation_due": self.evaluation_due,
            "reached": self._reached,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        self.losses = deque(state["losses"], maxlen=self._training.stop.window)
        self.metrics = dict(state["metrics"])
        self.best = None if state["best"] is None else BestSoFar(**state["best"])
        self.evaluation_due = state["evaluation_due"]
        self._reached = state["reached"]

    def _is_evaluated(self, draw: Draw, losses: Collection[float]) -> bool:
        if self._training.evaluate is None:
            return False
        at_epoch = draw.ends_epoch and draw.after.epoch % self._training.evaluate_every == 0
        return at_epoch or bool(self._over_by_steps(draw.after, losses))

    def _over_by_steps(self, cursor: Cursor, losses: Collection[float]) -> str:
        return self._training.stop.by_progress(cursor.step, cursor.epoch, losses)


_CALM = "A lower learning rate or clip_norm may help."


def finite_sums(
    step: Step, total: Contribution, layout: FlatLayout, scale: LossScale | None, progress: Progress
) -> StepSums:
    """What is read of a step's sum; `Diverged` where it is no number. A scaled gradient may overflow a few times."""
    sums = layout.sums(total.values)
    if not math.isfinite(sums.loss):
        raise divergence_error(step, sums.loss, progress)
    if not sums.finite and (scale is None or scale.value <= 1.0):
        named = zip(layout.names, layout.gradient_views(total.values), strict=True)
        broken = next((name for name, view in named if not view.isfinite().all()), "all together")
        raise Diverged(f"{_at(step)}: the gradient of {broken!r} is not finite; the loss is {sums.loss:.6g}. {_CALM}")
    return sums


def divergence_error(step: Step, loss: float, progress: Progress) -> Diverged:
    """A loss that is no number, in words."""
    before = f"; it was {progress.lately} before" if progress.lately else ""
    return Diverged(f"{_at(step)}: the loss is {loss}{before}. {_CALM}")


def _at(step: Step) -> str:
    return f"step {step.number + 1}, epoch {step.draw.at.epoch + 1}"
