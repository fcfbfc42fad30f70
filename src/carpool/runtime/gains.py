"""What a step counts for when a training has another batch than its own; pure."""

from __future__ import annotations


class Gains:
    """With a batch m: m/m0·(φ + m0)/(φ + m) steps with the own m0, if the learning rate grows by as much.

    φ is the gradient noise scale; this is the gain of AdaScale (Johnson et al., ICML 2020). It is fixed when a batch is
    first used, from the noise that is known then: a learning rate that followed every report would make the noise of
    reports part of the training.
    """

    def __init__(self) -> None:
        self._noise: float | None = None
        self._of: dict[tuple[int, int], float] = {}

    def hear(self, noise: float | None) -> None:
        """The noise scale as a worker has measured it; None: it cannot tell."""
        self._noise = self._noise if noise is None else noise

    def of(self, batch_size: int, own: int) -> float:
        """In steps with the own batch; 0: nobody knows yet."""
        if batch_size == own:
            return 1.0
        if (batch_size, own) not in self._of and self._noise is not None:
            self._of[batch_size, own] = batch_size / own * (self._noise + own) / (self._noise + batch_size)
        return self._of.get((batch_size, own), 0.0)
