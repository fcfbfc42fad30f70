"""What recordings of a step consist of: those of one outline of batches, with every tensor they touch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from carpool.runtime.gathering import Gathering
from carpool.runtime.proof import OptimizerOptions
from carpool.runtime.recorder import Replay

_PROOFS = 2  # steps made both ways before a recording is trusted


@dataclass(slots=True, eq=False)
class TakenUpdate:
    """The recording of an update."""

    replay: Replay
    options: OptimizerOptions
    remembers: list[Tensor]  # held, because the recording has their addresses
    proofs: int = 0

    @property
    def is_proven(self) -> bool:
        """Whether it may stand for the code."""
        return self.proofs >= _PROOFS


@dataclass(slots=True, eq=False)
class Take:
    """The recordings for batches of one outline, and every tensor they touch."""

    batch: Any
    gathering: Gathering | None  # how the batch comes about, where that is recorded too
    made: Tensor  # the loss on the device
    loss: Tensor  # on the host
    buffers: list[Tensor]
    before: list[Tensor]  # buffers as they were before the pass
    forward: Replay | None = None
    backward: Replay | None = None
    gradients: list[Tensor | None] = field(default_factory=list)
    proofs: int = 0
    update: TakenUpdate | None = None

    @property
    def is_proven(self) -> bool:
        """Whether the pass may be replayed."""
        return self.proofs >= _PROOFS

    @property
    def is_proven_wholly(self) -> bool:
        """Whether the update may be replayed too."""
        return self.is_proven and self.update is not None and self.update.is_proven
