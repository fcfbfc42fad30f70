"""Turn token: a worker's grants to compute on a time-sliced device, and the handoff to the next worker.

Calls in a step: `try_begin`; `before_launch` before anything that must not be queued early; `after_launch` when forward
and backward are launched; `after_update_launch` when the update is; `step_done`. With a `DeviceHandoff` the executor
grants the next turn while the last step runs, and workers pass the device among themselves; without one, or with
several ranks, every grant is requested from the executor.
"""

from __future__ import annotations

import os
import select
import time
from collections import deque
from collections.abc import Callable, Iterable

import torch

from carpool.runtime.process.protocol import Grant, Message, TurnEnded, TurnEnding, TurnRequested
from carpool.runtime.sharing.device_handoff import DeviceHandoff, HandoffSignal, signal_of

_POLL_S = 50e-6


class TurnToken:
    """The grants of one worker in one process group."""

    def __init__(
        self, send: Callable[[Message], None], handoff: DeviceHandoff | None, signal: HandoffSignal | None
    ) -> None:
        self._send = send
        self._handoff = handoff
        self._signal = signal
        self._grants: deque[Grant] = deque()
        self._number = 0  # of the current grant
        self.steps_left = 0  # of the current grant
        self._is_requested = False
        self._queued_after = 0  # the device may still wait for the end of this grant
        self._signaled = 0  # the device will signal the end of this grant
        self._awaited = 0  # the host waits for the end of this grant before it launches more than a step's head

    def add_grant(self, grant: Grant) -> None:
        if self.steps_left and self._number and grant.after == self._number:  # follows the current one
            self.steps_left += grant.steps
            self._number, self._is_requested = grant.number, False
        else:
            self._grants.append(grant)

    @property
    def is_used_up(self) -> bool:
        """Whether the current grant must be handed off once the device has finished its steps."""
        return bool(self._number) and not self.steps_left

    @property
    def has_turn(self) -> bool:
        return bool(self.steps_left or self._number or self._grants)

    def hand_off(self, *, is_last: bool = False) -> None:
        """Pass the device on; it must have finished."""
        assert self._handoff is not None
        self._handoff.reach(self._number)
        self._send(TurnEnded(self._number, is_last))
        self._number = 0

    def finish(self) -> None:
        """End the current grant, because the training is over and the device has finished."""
        self.steps_left = 0
        if self.is_used_up:
            self.hand_off(is_last=True)

    def try_begin(self, step: int, *, can_queue: bool = True) -> bool:
        """Whether a step may begin now; requests a grant if there is none.

        Without ``can_queue``, only the head of the step may be launched before the device is free, and `before_launch`
        waits for that.
        """
        if not self.steps_left and self._grants and self._is_next(self._grants[0], can_queue):
            grant = self._grants.popleft()
            self.steps_left, self._is_requested = grant.steps, False
            if self._handoff is not None:
                self._number = grant.number
        if not self.steps_left and not self._grants and not self._is_requested:
            self._send(TurnRequested(step))
            self._is_requested = True
        return self.steps_left > 0

    def before_launch(self) -> None:
        """Wait for the device after the head of a step was launched.

        The next client in line spins, so that it starts microseconds after its predecessor's last kernel; others sleep.
        """
        while self._handoff is not None and not self._handoff.has_reached(self._awaited):
            os.sched_yield() if self._handoff.has_reached(self._awaited - 1) else time.sleep(_POLL_S)

    def after_launch(self) -> None:
        """Announce the end of the turn during its last step, so that the next worker can prepare.

        The host sleeps until the device has started: a CUDA synchronization would spin on a core instead.
        """
        while self._handoff is not None and not self._handoff.has_reached(self._queued_after):
            time.sleep(_POLL_S)
        if self._number and self.steps_left == 1 and not self._grants and not self._is_requested:
            self._send(TurnEnding(self._number))
            self._is_requested = True

    def after_update_launch(self) -> None:
        """Let the device itself signal the end of the turn: the whole step is launched and no user code follows."""
        if self._number and self.steps_left == 1:
            self._signal_end()

    def step_done(self, *, is_idle: bool) -> None:
        """Count a step; ``is_idle``: no evaluation or halt follows it."""
        self.steps_left -= 1
        if self.is_used_up and is_idle:
            self._signal_end()

    def _signal_end(self) -> None:
        # Once per grant: later the next worker may have written a higher number, which must not decrease.
        if self._signal is not None and self._signaled != self._number:
            self._signal.reach(self._number)
            self._signaled = self._number

    def wait(self, fd: int) -> None:
        """Wait until the device may have been handed over, or ``fd`` is readable."""
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        if self._grants and self._handoff is not None:
            poll.register(self._handoff.event, select.POLLIN)
        if any(ready != fd for ready, _ in poll.poll()) and self._handoff is not None:
            self._handoff.clear_event()

    def _is_next(self, grant: Grant, can_queue: bool) -> bool:
        if self._handoff is None or self._handoff.has_reached(grant.after):
            return True
        if self._signal is None:
            return False
        self._signal.hold_until(grant.after)
        self._queued_after = grant.after
        if not can_queue:
            self._awaited = grant.after
        return True


class TurnTokens:
    """Creates the token of each process group that a worker joins."""

    def __init__(
        self,
        send: Callable[[Message], None],
        device: torch.device,
        handoff: DeviceHandoff | None = None,
        grants: Iterable[Grant] = (),
    ) -> None:
        self._send = send
        self._handoff = handoff
        self._signal = None if handoff is None else signal_of(handoff, device)
        self._grants = list(grants)  # received before the first process group

    def new_token(self, size: int) -> TurnToken:
        """The token for a process group of this size; with several ranks the executor hands every turn on."""
        token = TurnToken(self._send, self._handoff if size == 1 else None, self._signal)
        while self._grants:
            token.add_grant(self._grants.pop())
        return token
