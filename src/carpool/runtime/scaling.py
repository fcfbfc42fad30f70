"""Loss scaling, so that small float16 gradients do not vanish."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class LossScale:
    """The factor on the loss: halved when a gradient overflows (that step is left out), doubled after a long calm.

    Always a power of two, so that scaling back is exact; the rule is that of Micikevicius et al. 2018.
    """

    value: float = 2.0**16
    calm: int = 0  # steps since it last changed
    patience: int = 2000

    def overflowed(self) -> None:
        """Take note of a gradient that is not finite."""
        self.value /= 2
        self.calm = 0

    def passed(self) -> None:
        """Take note of a step whose gradients were finite."""
        self.calm += 1
        if self.calm == self.patience:
            self.value *= 2
            self.calm = 0

    def state_dict(self) -> dict[str, Any]:
        """What resuming needs."""
        return {"value": self.value, "calm": self.calm}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.value, self.calm = state["value"], state["calm"]
