"""Swap client: swaps a worker's device state in and out at step boundaries as the executor orders."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from carpool.runtime.memory.device_state import DeviceState
from carpool.runtime.process.protocol import MemoryMeasured, Message, SwapIn, SwapOut, SwappedOut


class SwapClient:
    """Applies swap orders to a device state; without one, every method is a no-op."""

    def __init__(self, device_state: DeviceState | None, send: Callable[[Message], None]) -> None:
        self._device_state = device_state
        self._send = send
        self._pending: SwapOut | None = None  # carried out when the worker has no turn
        self._reported: MemoryMeasured | None = None

    @property
    def is_disabled(self) -> bool:
        return self._device_state is None

    def handle(self, order: SwapOut | SwapIn) -> None:
        """Swap in at once, or out at the next `swap_out_if_ordered`."""
        if isinstance(order, SwapIn):
            self.swap_in(include_scratch=order.wholly)
        elif self._pending is None or order.wholly:
            self._pending = order

    def swap_out_if_ordered(self) -> None:
        """Carry out a pending order; call it while the worker has no turn."""
        if self._pending is not None and self._device_state is not None:
            order, self._pending = self._pending, None
            self._device_state.swap_out(include_state=order.wholly)
            self._send(SwappedOut(order.wholly))

    def swap_out(self) -> None:
        """Free all device memory at the end of training; the state stays readable on the host."""
        if self._device_state is not None and self._device_state.is_in_region:
            self._device_state.swap_out(include_state=True)
            self._pending = None
            self._send(SwappedOut(wholly=True))

    def swap_in(self, *, include_scratch: bool = True) -> None:
        if self._device_state is not None:
            self._device_state.swap_in(include_scratch=include_scratch)

    def await_weights(self) -> None:
        if self._device_state is not None:
            self._device_state.swap_in()
            self._device_state.await_weights()

    def await_state(self) -> None:
        self.await_weights()
        if self._device_state is not None:
            self._device_state.await_state()
            self._device_state.mark_dirty()

    def enter_region(self) -> None:
        """Make the state swappable; called after a step, when the optimizer's state exists."""
        if self._device_state is not None:
            self._device_state.enter_region()

    def leave_region(self) -> None:
        """Make the state unswappable, before another one is loaded."""
        if self._device_state is not None:
            self._device_state.leave_region()

    def report_usage(self) -> None:
        if self._device_state is None or not self._device_state.is_in_region:
            return
        need = self._device_state.memory_need()
        measured = MemoryMeasured(need.state, need.scratch, need.fixed)
        if measured != self._reported:
            self._reported = measured
            self._send(measured)

    def notes(self) -> tuple[str, ...]:
        note = "" if self._device_state is None else self._device_state.note()
        return (note,) if note else ()

    def readable(self) -> AbstractContextManager[None]:
        return nullcontext() if self._device_state is None else self._device_state.readable()
