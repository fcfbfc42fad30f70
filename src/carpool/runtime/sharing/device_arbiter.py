"""Device arbiter: grants turns on each device of a node and admits jobs under a memory cap."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from carpool.jobs.devices import LocalDevice
from carpool.runtime.executor.client_protocol import ExecutorOptions
from carpool.runtime.job_state.types import WorkerSlot
from carpool.runtime.memory.eviction_policy import MemoryNeed
from carpool.runtime.memory.memory_arbiter import MemoryArbiter
from carpool.runtime.process.protocol import (
    Grant,
    MemoryMeasured,
    Message,
    SwapIn,
    SwapOut,
    SwappedOut,
    TurnEnded,
    TurnEnding,
)
from carpool.runtime.process.worker_pool import WorkerKey
from carpool.runtime.sharing.device_handoff import DeviceHandoff, new_handoff
from carpool.runtime.sharing.stride_scheduler import StrideScheduler, TurnGrant

ArbiterMessage = TurnEnding | TurnEnded | MemoryMeasured | SwappedOut
_SETTLING = 16  # steps of a worker's first turn under a cap: made by the code, recorded, proved


class DeviceArbiter:
    """The tokens of some devices; ``tell`` hands a message to whom it is for."""

    def __init__(
        self, devices: Iterable[LocalDevice], options: ExecutorOptions, tell: Callable[[WorkerKey, Message], None]
    ) -> None:
        rules = options.max_wait_s, options.quantum_s, options.turn_steps
        gpus = set() if options.memory_cap else {each.id for each in devices if each.cuda is not None}
        self._turns = {
            each.id: StrideScheduler[WorkerKey](*rules, options.heirs if each.id in gpus else 1) for each in devices
        }
        self._batons = {device: DeviceHandoff(*new_handoff()) for device in self._turns}
        how = options.memory_cap, options.speculates, options.leaves_early
        self._berths = {device: MemoryArbiter[WorkerKey](*how) for device in self._turns} if options.memory_cap else {}
        self._lodgers: set[WorkerKey] = set()  # whose memory comes and goes; that of others stays, and is not counted
        self._settling: set[WorkerKey] = set()  # hold the token since before their first formation
        self._tell = tell

    def descriptors(self, device: int) -> tuple[int, int]:
        """What a worker on a device needs to pass its baton on."""
        return self._batons[device].descriptors

    def arrive(self, at: float, who: WorkerKey, seat: WorkerSlot) -> None:
        """Somebody wants to come on a device under a cap."""
        turns = self._turns[seat.device]
        self._lodgers.add(who)
        self._settling.add(who)
        turns.ask(at, who, seat.turn, seat.fraction, may_take_several=True, may_inherit=True, least_steps=_SETTLING)
        self.grant(at, seat.device)

    def ask(
        self, at: float, who: WorkerKey, seat: WorkerSlot, *, may_take_several: bool, may_inherit: bool = False
    ) -> None:
        """Somebody wants to compute on a device."""
        turns = self._turns[seat.device]
        turns.ask(at, who, seat.turn, seat.fraction, may_take_several=may_take_several, may_inherit=may_inherit)
        self.grant(at, seat.device)

    def heard(self, at: float, device: int, who: WorkerKey, message: ArbiterMessage) -> None:
        """Somebody said something about its turn, or about its memory."""
        turns, berths = self._turns[device], self._berths.get(device)
        match message:
            case TurnEnded(number, is_last):
                turns.passed(at, who, number)
                if is_last:
                    self.withdraw(at, device, who)
            case TurnEnding(number):
                for granted in turns.ending(at, who, number):
                    self._offer(device, granted)
            case MemoryMeasured(state, scratch, fixed) if berths is not None:
                berths.measured(who, MemoryNeed(state, scratch, fixed))
            case SwappedOut(wholly) if berths is not None:
                berths.left(who, wholly=wholly)
        self.grant(at, device)

    def give_back(self, at: float, device: int, who: WorkerKey) -> None:
        """Somebody does not need the token of a device any more for now."""
        self._turns[device].give_back(at, who)

    def withdraw(self, at: float, device: int, who: WorkerKey) -> None:
        """Somebody rests."""
        self._turns[device].withdraw(at, who)
        if device in self._berths:
            self._berths[device].give_up(who)

    def begins_anew(self, at: float, device: int, who: WorkerKey) -> None:
        """Somebody gets a new place, and will ask anew there, unless it has just arrived and has its turn already."""
        if who in self._settling:
            self._settling.discard(who)
            return
        self._turns[device].leave(at, who)
        if device in self._berths:
            self._berths[device].give_up(who)

    def leave(self, at: float, device: int, who: WorkerKey) -> None:
        """Somebody is gone from a device."""
        self._settling.discard(who)
        self._lodgers.discard(who)
        self._turns[device].leave(at, who)
        if device in self._berths:
            self._berths[device].gone(who)

    def forget(self, at: float, who: WorkerKey) -> None:
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

    def _offer(self, device: int, granted: TurnGrant[WorkerKey]) -> None:
        """Tell somebody of its grant, under a cap once there is room for it."""
        if device in self._berths and granted.who in self._lodgers:
            self._berths[device].want(granted)
        else:
            self._tell(granted.who, Grant(granted.steps, granted.number, granted.after))

    def _move(self, at: float, device: int) -> None:
        turns, berths = self._turns[device], self._berths[device]
        moves = berths.moves(turns.holder, turns.likely(at))
        for leaver in moves.leave:
            self._tell(leaver.who, SwapOut(leaver.wholly))
        for who, steps, number, after in moves.told:
            self._tell(who, Grant(steps, number, after, 0 if who in berths.needs else berths.room))
        for comer in moves.come:
            self._tell(comer.who, SwapIn(comer.wholly))
