"""Whose turn it is on each device of a node: tokens, batons that pass from worker to worker, and memory under a cap."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from carpool.runtime.baton import Baton, new_baton
from carpool.runtime.berths import Berths
from carpool.runtime.crew import Seat
from carpool.runtime.devices import LocalDevice
from carpool.runtime.protocol import Ending, Grant, Measures, Message, Occupy, Passed, Vacate, Vacated
from carpool.runtime.residency import Need
from carpool.runtime.staff import Key
from carpool.runtime.turns import Granted, Turns
from carpool.runtime.wire import ExecutorOptions

Said = Ending | Passed | Measures | Vacated
_SETTLING = 16  # steps of a worker's first turn under a cap: made by the code, recorded, proved


class Rota:
    """The tokens of some devices; ``tell`` hands a message to whom it is for."""

    def __init__(
        self, devices: Iterable[LocalDevice], options: ExecutorOptions, tell: Callable[[Key, Message], None]
    ) -> None:
        rules = options.max_wait_s, options.quantum_s, options.turn_steps
        gpus = set() if options.memory_cap else {each.id for each in devices if each.cuda is not None}
        self._turns = {each.id: Turns[Key](*rules, options.heirs if each.id in gpus else 1) for each in devices}
        self._batons = {device: Baton(*new_baton()) for device in self._turns}
        how = options.memory_cap, options.speculates, options.leaves_early
        self._berths = {device: Berths[Key](*how) for device in self._turns} if options.memory_cap else {}
        self._lodgers: set[Key] = set()  # whose memory comes and goes; that of others stays, and is not counted
        self._settling: set[Key] = set()  # hold the token since before their first formation
        self._tell = tell

    def descriptors(self, device: int) -> tuple[int, int]:
        """What a worker on a device needs to pass its baton on."""
        return self._batons[device].descriptors

    def arrive(self, at: float, who: Key, seat: Seat) -> None:
        """Somebody wants to come on a device under a cap."""
        turns = self._turns[seat.device]
        self._lodgers.add(who)
        self._settling.add(who)
        turns.ask(at, who, seat.turn, seat.fraction, may_take_several=True, may_inherit=True, least_steps=_SETTLING)
        self.grant(at, seat.device)

    def ask(self, at: float, who: Key, seat: Seat, *, may_take_several: bool, may_inherit: bool = False) -> None:
        """Somebody wants to compute on a device."""
        turns = self._turns[seat.device]
        turns.ask(at, who, seat.turn, seat.fraction, may_take_several=may_take_several, may_inherit=may_inherit)
        self.grant(at, seat.device)

    def heard(self, at: float, device: int, who: Key, message: Said) -> None:
        """Somebody said something about its turn, or about its memory."""
        turns, berths = self._turns[device], self._berths.get(device)
        match message:
            case Passed(number, is_last):
                turns.passed(at, who, number)
                if is_last:
                    self.withdraw(at, device, who)
            case Ending(number):
                for granted in turns.ending(at, who, number):
                    self._offer(device, granted)
            case Measures(state, scratch, fixed) if berths is not None:
                berths.measured(who, Need(state, scratch, fixed))
            case Vacated(wholly) if berths is not None:
                berths.left(who, wholly=wholly)
        self.grant(at, device)

    def give_back(self, at: float, device: int, who: Key) -> None:
        """Somebody does not need the token of a device any more for now."""
        self._turns[device].give_back(at, who)

    def withdraw(self, at: float, device: int, who: Key) -> None:
        """Somebody rests."""
        self._turns[device].withdraw(at, who)
        if device in self._berths:
            self._berths[device].give_up(who)

    def begins_anew(self, at: float, device: int, who: Key) -> None:
        """Somebody gets a new place, and will ask anew there, unless it has just arrived and has its turn already."""
        if who in self._settling:
            self._settling.discard(who)
            return
        self._turns[device].leave(at, who)
        if device in self._berths:
            self._berths[device].give_up(who)

    def leave(self, at: float, device: int, who: Key) -> None:
        """Somebody is gone from a device."""
        self._settling.discard(who)
        self._lodgers.discard(who)
        self._turns[device].leave(at, who)
        if device in self._berths:
            self._berths[device].gone(who)

    def forget(self, at: float, who: Key) -> None:
        """Somebody needs no token any more, wherever it had one: others may have it."""
        for device in self._turns:
            self.leave(at, device, who)
            self.grant(at, device)

    def grant(self, at: float, device: int) -> None:
        """Let the next one compute, if the token is free, and those come in for whom there is room."""
        turns = self._turns[device]
        granted = turns.next(at)
        self._batons[device].reach(turns.over)
        if granted is not None:
            self._offer(device, granted)
        if device in self._berths:
            self._move(at, device)

    def story(self, job: str) -> str:
        """How often a job that took turns under a cap found its memory where it was; nothing if it did not."""
        counts = [c for berths in self._berths.values() for who, c in berths.counts.items() if who[0] == job]
        turns, hits = sum(each.turns for each in counts), sum(each.hits for each in counts)
        return (
            f"came to {turns} turns under the memory cap, {hits} of them with its state on the device" if turns else ""
        )

    def tick(self) -> None:
        """Repeat what the batons should say: a worker that was taken off its turn may have written another number."""
        for device, turns in self._turns.items():
            self._batons[device].reach(turns.over)

    def close(self) -> None:
        """Let go of the batons."""
        for baton in self._batons.values():
            baton.close()

    def _offer(self, device: int, granted: Granted[Key]) -> None:
        """Tell somebody of its grant, under a cap once there is room for it."""
        if device in self._berths and granted.who in self._lodgers:
            self._berths[device].want(granted)
        else:
            self._tell(granted.who, Grant(granted.steps, granted.number, granted.after))

    def _move(self, at: float, device: int) -> None:
        turns, berths = self._turns[device], self._berths[device]
        moves = berths.moves(turns.holder, turns.likely(at))
        for leaver in moves.leave:
            self._tell(leaver.who, Vacate(leaver.wholly))
        for who, steps, number, after in moves.told:
            self._tell(who, Grant(steps, number, after, 0 if who in berths.needs else berths.room))
        for comer in moves.come:
            self._tell(comer.who, Occupy(comer.wholly))
