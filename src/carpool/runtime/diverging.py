"""How it shows that a training has left the finite numbers, and how that is told."""

from __future__ import annotations

import math

from carpool.runtime.errors import Diverged
from carpool.runtime.flat import Contribution, Layout, Sums
from carpool.runtime.passes import Step
from carpool.runtime.progress import Progress
from carpool.runtime.scaling import LossScale

_CALM = "A lower learning rate or clip_norm may help."


def finite_sums(step: Step, total: Contribution, layout: Layout, scale: LossScale | None, progress: Progress) -> Sums:
    """What is read of a step's sum; `Diverged` where it is no number. A scaled gradient may overflow a few times."""
    sums = layout.sums(total.values)
    if not math.isfinite(sums.loss):
        raise diverged(step, sums.loss, progress)
    if not sums.finite and (scale is None or scale.value <= 1.0):
        named = zip(layout.names, layout.gradient_views(total.values), strict=True)
        broken = next((name for name, view in named if not view.isfinite().all()), "all together")
        raise Diverged(f"{_at(step)}: the gradient of {broken!r} is not finite; the loss is {sums.loss:.6g}. {_CALM}")
    return sums


def diverged(step: Step, loss: float, progress: Progress) -> Diverged:
    """A loss that is no number, in words."""
    before = f"; it was {progress.lately} before" if progress.lately else ""
    return Diverged(f"{_at(step)}: the loss is {loss}{before}. {_CALM}")


def _at(step: Step) -> str:
    return f"step {step.number + 1}, epoch {step.draw.at.epoch + 1}"
