"""Swap client: swaps a worker's device state in and out at step boundaries as the executor orders."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from carpool.runtime.memory.device_state import DeviceState
from carpool.runtime.process.protocol import MemoryMeasured, Message, SwapIn, SwapOut, SwappedOut


class SwapClient:
    """Carries out what is said about a residence at the right moments; without one, its memory stays."""

    def __init__(self, residence: DeviceState | None, say: Callable[[Message], None]) -> None:
        self._residence = residence
        self._say = say
        self._way: SwapOut | None = None  # to be made once there is no turn
        self._told: MemoryMeasured | None = None

    @property
    def stays(self) -> bool:
        """Whether its memory never leaves the device."""
        return self._residence is None

    def hear(self, order: SwapOut | SwapIn) -> None:
        """Come at once, or leave when `make_way` is called."""
        if isinstance(order, SwapIn):
            self.come(wholly=order.wholly)
        elif self._way is None or order.wholly:
            self._way = order

    def make_way(self) -> None:
        """There is no turn: leave, if that was said."""
        if self._way is not None and self._residence is not None:
            order, self._way = self._way, None
            self._residence.leave(wholly=order.wholly)
            self._say(SwappedOut(order.wholly))

    def part(self) -> None:
        """No further step is made: leave at once, and be read where the state is then."""
        if self._residence is not None and self._residence.is_settled:
            self._residence.leave(wholly=True)
            self._way = None
            self._say(SwappedOut(wholly=True))

    def come(self, *, wholly: bool = True) -> None:
        """Bring in what is missing, while another may still compute; not wholly: the state alone."""
        if self._residence is not None:
            self._residence.come_back(wholly=wholly)

    def enter(self) -> None:
        """A step begins."""
        if self._residence is not None:
            self._residence.come_back()
            self._residence.await_weights()

    def enter_wholly(self) -> None:
        """All of the state is about to be read, or written."""
        self.enter()
        if self._residence is not None:
            self._residence.await_rest()
            self._residence.change()

    def settle(self) -> None:
        """A step was made."""
        if self._residence is not None:
            self._residence.settle()

    def unsettle(self) -> None:
        """Another state comes."""
        if self._residence is not None:
            self._residence.unsettle()

    def tell_measures(self) -> None:
        """A turn is over: say what is taken, if that has changed."""
        if self._residence is None or not self._residence.is_settled:
            return
        need = self._residence.need()
        measures = MemoryMeasured(need.state, need.scratch, need.fixed)
        if measures != self._told:
            self._told = measures
            self._say(measures)

    def story(self) -> tuple[str, ...]:
        """What the job's story should say of it."""
        words = "" if self._residence is None else self._residence.story()
        return (words,) if words else ()

    def readable(self) -> AbstractContextManager[None]:
        """While the host reads the state."""
        return nullcontext() if self._residence is None else self._residence.readable()
