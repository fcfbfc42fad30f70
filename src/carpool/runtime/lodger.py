"""A worker whose memory on the device comes and goes with its turns, as the executor says."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from carpool.runtime.protocol import Measures, Message, Occupy, Vacate, Vacated
from carpool.runtime.residence import Residence


class Lodger:
    """Carries out what is said about a residence at the right moments; without one, its memory stays."""

    def __init__(self, residence: Residence | None, say: Callable[[Message], None]) -> None:
        self._residence = residence
        self._say = say
        self._way: Vacate | None = None  # to be made once there is no turn
        self._told: Measures | None = None

    @property
    def stays(self) -> bool:
        """Whether its memory never leaves the device."""
        return self._residence is None

    def hear(self, order: Vacate | Occupy) -> None:
        """Come at once, or leave when `make_way` is called."""
        if isinstance(order, Occupy):
            self.come(wholly=order.wholly)
        elif self._way is None or order.wholly:
            self._way = order

    def make_way(self) -> None:
        """There is no turn: leave, if that was said."""
        if self._way is not None and self._residence is not None:
            order, self._way = self._way, None
            self._residence.leave(wholly=order.wholly)
            self._say(Vacated(order.wholly))

    def part(self) -> None:
        """No further step is made: leave at once, and be read where the state is then."""
        if self._residence is not None and self._residence.is_settled:
            self._residence.leave(wholly=True)
            self._way = None
            self._say(Vacated(wholly=True))

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
        measures = Measures(need.state, need.scratch, need.fixed)
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
