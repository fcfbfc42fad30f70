"""When a team has to be alone on its device: to try again what ran out of memory, and to be measured; pure."""

from __future__ import annotations

from carpool.runtime.actions import Action, BeAlone, Rejoin
from carpool.runtime.crew import Wish


class Seclusion:
    """What one team asks of its neighbours, who then stand still until it lets them go on."""

    def __init__(self) -> None:
        self.is_awaited = False  # the neighbours have not come to a standstill yet
        self._short_at: int | None = None  # the step that ran out of memory and is tried again
        self._probing = 0  # generation for whose probe the neighbours were asked to stand still; 0: for none
        self._probed = 0  # newest generation whose probe was measured

    @property
    def is_second_try(self) -> bool:
        """Whether the present step has run out of memory before."""
        return self._short_at is not None

    def probe_of(self, wish: Wish) -> int:
        """Steps that are still to be measured for a wish."""
        return wish.probe if self._probed < wish.generation else 0

    def is_probing(self, generation: int) -> bool:
        """Whether the neighbours stand still so that a measurement for this generation can be made."""
        return bool(self._probing) and self._probing == generation

    def ask_for_probe(self, wish: Wish) -> list[Action]:
        """Before a probe: ask for quiet, once. What spans devices is not measured alone."""
        if self._probing or self.is_awaited or not self.probe_of(wish) or len(wish.seats) != 1:
            return []
        self._probing, self.is_awaited = wish.generation, True
        return [BeAlone(wish.seats[0].device, clears=False)]

    def ask_for_memory(self, step: int, device: int) -> list[Action]:
        """A step ran out of memory for the first time: ask for room."""
        self._short_at, self.is_awaited = step, True
        return [BeAlone(device)]

    def granted(self) -> None:
        """The neighbours stand still."""
        self.is_awaited = False

    def progressed(self, step: int) -> list[Action]:
        """So many steps are done: where one of them had run short, the neighbours may go on."""
        if self._short_at is None or step <= self._short_at or self.is_awaited:
            return []
        self._short_at = None
        return [Rejoin()]

    def measured(self, generation: int) -> list[Action]:
        """The probe of a generation has been made."""
        self._probed = generation
        return self.end_probe()

    def end_probe(self) -> list[Action]:
        """Let neighbours go on that stood still for a probe."""
        if not self._probing:
            return []
        self._probing, self.is_awaited = 0, False
        return [Rejoin()]

    def end(self) -> list[Action]:
        """Nothing is asked for any more."""
        actions = self.end_probe()
        if self._short_at is not None:
            self._short_at, self.is_awaited = None, False
            actions.append(Rejoin())
        return actions
