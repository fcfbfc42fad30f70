"""Step grants: permission to apply the steps of a job across nodes, requested ahead of time; pure.

A message to the lead and back takes as long as a short step. So a rank requests the next steps while it still has
granted ones, and the process group, which waits for all ranks anyway, reduces meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass

from carpool.runtime.process.protocol import Apply, Contributed


@dataclass(slots=True, eq=False)
class StepGrants:
    """The steps of one epoch that a rank may apply."""

    epoch: int
    next_step: int  # the first without permission
    ahead: int = 0  # how many steps ahead permission is requested
    asked: int = -1  # the last step for which it was requested
    halt_after: int | None = None
    pass_s: float = 0.0  # of the passes since then
    passes: int = 0

    def is_due(self, step: int) -> bool:
        return self.asked < self.next_step <= step + self.ahead and self.halt_after is None

    def ask(self, done: int, samples: int) -> Contributed:
        """The message that asks for the next steps; `samples` is of one pass."""
        seconds = self.pass_s / self.passes if self.passes else 0.0
        self.asked, self.pass_s, self.passes = self.next_step, 0.0, 0
        return Contributed(self.epoch, self.next_step, seconds, samples, done=done)

    def count_pass(self, seconds: float) -> None:
        self.pass_s += seconds
        self.passes += 1

    def take(self, apply: Apply) -> None:
        if (apply.epoch, apply.step) == (self.epoch, self.next_step):
            self.next_step += apply.steps
            self.ahead = apply.steps // 2
            self.halt_after = self.next_step - 1 if apply.halt else None
