"""Device arbiter: grants turns on each device of a node and admits jobs under a memory cap."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from carpool.core.units import format_bytes
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
_FIRST_STEPS = 16  # of a worker's first turn under a cap: eager, captured and verified


class DeviceArbiter:
    """Turns and, under a memory cap, memory of the devices; ``send`` delivers a message to a worker."""

    def __init__(
        self, devices: Iterable[LocalDevice], options: ExecutorOptions, send: Callable[[WorkerKey, Message], None]
    ) -> None:
        rules = options.max_wait_s, options.quantum_s, options.turn_steps
        gpus = set() if options.memory_cap else {device.id for device in devices if device.cuda is not None}
        self._turns = {
            device.id: StrideScheduler[WorkerKey](*rules, options.heirs if device.id in gpus else 1)
            for device in devices
        }
        self._handoffs = {device: DeviceHandoff(*new_handoff()) for device in self._turns}
        how = options.memory_cap, options.speculates, options.leaves_early
        self._memory = {device: MemoryArbiter[WorkerKey](*how) for device in self._turns} if options.memory_cap else {}
        self._swappable: set[WorkerKey] = set()  # the memory of other workers stays and is not counted
        self._first_turn: set[WorkerKey] = set()  # admitted, but not in an epoch yet
        self._send = send

    def handoff_descriptors(self, device: int) -> tuple[int, int]:
        return self._handoffs[device].descriptors

    def request_admission(self, at: float, key: WorkerKey, slot: WorkerSlot) -> None:
        self._swappable.add(key)
        self._first_turn.add(key)
        self._turns[slot.device].request(
            at, key, slot.turn, slot.fraction, multi_step=True, can_queue=True, min_steps=_FIRST_STEPS
        )
        self.grant_next(at, slot.device)

    def request_turn(
        self, at: float, key: WorkerKey, slot: WorkerSlot, *, multi_step: bool, can_queue: bool = False
    ) -> None:
        turns = self._turns[slot.device]
        turns.request(at, key, slot.turn, slot.fraction, multi_step=multi_step, can_queue=can_queue)
        self.grant_next(at, slot.device)

    def on_message(self, at: float, device: int, key: WorkerKey, message: ArbiterMessage) -> None:
        turns, memory = self._turns[device], self._memory.get(device)
        match message:
            case TurnEnded(number, is_last):
                turns.on_ended(at, key, number)
                if is_last:
                    self.cancel_turn(at, device, key)
            case TurnEnding(number):
                for grant in turns.on_ending(at, key, number):
                    self._announce(device, grant)
            case MemoryMeasured(state, scratch, fixed) if memory is not None:
                memory.on_measured(key, MemoryNeed(state, scratch, fixed))
            case SwappedOut(wholly) if memory is not None:
                memory.on_swapped_out(key, wholly=wholly)
        self.grant_next(at, device)

    def release_turn(self, at: float, device: int, key: WorkerKey) -> None:
        self._turns[device].release(at, key)

    def cancel_turn(self, at: float, device: int, key: WorkerKey) -> None:
        self._turns[device].cancel(at, key)
        if device in self._memory:
            self._memory[device].cancel(key)

    def on_new_epoch(self, at: float, device: int, key: WorkerKey) -> None:
        """Reset a worker that will request turns anew; one that was just admitted keeps its first turn."""
        if key in self._first_turn:
            self._first_turn.discard(key)
            return
        self._turns[device].remove(at, key)
        if device in self._memory:
            self._memory[device].cancel(key)

    def on_exit(self, at: float, device: int, key: WorkerKey) -> None:
        self._first_turn.discard(key)
        self._swappable.discard(key)
        self._turns[device].remove(at, key)
        if device in self._memory:
            self._memory[device].on_exit(key)

    def remove(self, at: float, key: WorkerKey) -> None:
        for device in self._turns:
            self.on_exit(at, device, key)
            self.grant_next(at, device)

    def grant_next(self, at: float, device: int) -> None:
        turns = self._turns[device]
        grant = turns.grant_next(at)
        self._handoffs[device].reach(turns.last_ended)
        if grant is not None:
            self._announce(device, grant)
        if device in self._memory:
            self._swap(at, device)

    def memory_limit(self, device: int, key: WorkerKey) -> str:
        """The memory that a worker may use under the cap, and the jobs whose processes keep the rest; empty: no cap."""
        memory = self._memory.get(device)
        if memory is None:
            return ""
        others = {other[0]: need.fixed for other, need in memory.needs.items() if other[0] != key[0] and need.fixed}
        cap = f"the memory cap allows ({format_bytes(memory.capacity)}"
        kept = f", of which the processes of {', '.join(sorted(others))} keep {format_bytes(sum(others.values()))}"
        return f"{cap}{kept if others else ''}; raise --memory-cap, or run fewer jobs at once)"

    def memory_summary(self, job: str) -> str:
        """How often a job under a memory cap found its state on the device; empty without a cap."""
        counts = [c for memory in self._memory.values() for key, c in memory.counts.items() if key[0] == job]
        turns, hits = sum(count.turns for count in counts), sum(count.hits for count in counts)
        return f"had {turns} turns under the memory cap, {hits} of them with its state on the device" if turns else ""

    def tick(self) -> None:
        """Write the handoff numbers again: a worker that lost its turn may have overwritten one."""
        for device, turns in self._turns.items():
            self._handoffs[device].reach(turns.last_ended)

    def close(self) -> None:
        for handoff in self._handoffs.values():
            handoff.close()

    def _announce(self, device: int, grant: TurnGrant[WorkerKey]) -> None:
        """Send a grant to its worker; under a cap, once there is memory for it."""
        if device in self._memory and grant.client in self._swappable:
            self._memory[device].enqueue(grant)
        else:
            self._send(grant.client, Grant(grant.steps, grant.number, grant.after))

    def _swap(self, at: float, device: int) -> None:
        turns, memory = self._turns[device], self._memory[device]
        plan = memory.plan(turns.holder, turns.likely_next(at))
        for evict in plan.swap_out:
            self._send(evict.client, SwapOut(evict.wholly))
        for key, steps, number, after in plan.granted:
            self._send(key, Grant(steps, number, after, 0 if key in memory.needs else memory.free_bytes))
        for admit in plan.swap_in:
            self._send(admit.client, SwapIn(admit.wholly))
