"""Settings common to all cases: jobs, lengths and folders."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trials.catalogue import EXAMPLES

Ends = dict[str, str]  # job to digest, or to what went wrong


class TrialFailed(Exception):
    """A way of running did not come to its end."""


@dataclass(slots=True)
class Trial:
    """The settings of this benchmark, and where one way of running puts its files."""

    jobs: tuple[str, ...]
    steps: int
    pause_s: float
    seed: int
    folder: Path = Path()
    mark: str = ""
    notes: dict[str, str] = field(default_factory=dict)  # what shows that it was really tried

    @property
    def middle(self) -> int:
        """A step well inside of the training."""
        return random.Random(self.seed).randrange(self.steps // 4, self.steps // 2)

    def arguments(self, job: str, **more: Any) -> dict[str, Any]:
        """What a job's entry takes."""
        return EXAMPLES[job].arguments(self.steps, self.pause_s, **more)
