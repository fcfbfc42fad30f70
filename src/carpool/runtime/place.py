"""A worker's place in a formation, and what it has measured there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from carpool.runtime.exchange import Exchange, copying_s
from carpool.runtime.meeting import Meeting
from carpool.runtime.protocol import Proceed
from carpool.runtime.reducer import Reducer
from carpool.runtime.slots import Owners
from carpool.runtime.speedometer import Speedometer
from carpool.runtime.token import Token
from carpool.runtime.trainer import Trainer


@dataclass(slots=True, eq=False)
class Place:
    """A worker's place in a formation."""

    said: Proceed
    owners: Owners
    parts: tuple[int, ...]
    reducer: Reducer | None  # None: it is alone
    speedometer: Speedometer
    exchange: Exchange | None = None  # None: everybody updates everything
    meeting: Meeting | None = None  # None: nothing is shown in the middle of a pass
    update_s: float = 0.0  # per element, of the last update
    copy_s: float = 0.0  # per element, of what an exchange copies
    token: Token | None = None  # where steps are made by token
    halting: bool = False  # at the next boundary, once its evaluation is made

    @property
    def pieces(self) -> range:
        """The pieces of every step that are its own."""
        return range(*self.owners[self.said.rank])

    @property
    def updates(self) -> range:
        """The parameters that it updates, and hands over to the others."""
        return range(*self.said.updates[self.said.rank])

    @property
    def threads(self) -> int | None:
        """As many as every other rank has, for what follows the pass: their number may change the bits; None: alone."""
        return self.said.update_threads or None

    def starts(self) -> None:
        """Nothing of a step has been said to the device yet: return when it may be."""
        if self.token is not None:
            self.token.starts()

    def is_queued(self) -> None:
        """Most of a step has been said to the device; if it is the last for now, another may make itself ready."""
        if self.token is not None:
            self.token.is_queued()

    def is_made(self) -> None:
        """All of a step has been said to the device, its update too, and nothing but another step follows."""
        if self.token is not None and not self.halting:
            self.token.is_made()

    def end(self, trainer: Trainer) -> None:
        """The training is over: the device is the next one's while the weights are saved."""
        if self.token is not None:
            trainer.await_device()
            self.token.end()

    def measure(self, trainer: Trainer, updated: Sequence[int]) -> None:
        """Note how long updating these parameters took, and how long copying what would be exchanged takes."""
        elements = sum(trainer.layout.parameters[index].numel() for index in updated)
        self.update_s = trainer.update.step_s / elements if elements else 0.0
        if not self.copy_s:
            self.copy_s = copying_s(trainer.layout, trainer.training.optimizer)
