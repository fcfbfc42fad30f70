"""Turn token: a worker's grants to compute on a time-sliced device, and the handoff to the next.

`begins` before a step; `starts` before what must not stand queued of it; `is_queued` when its kernels are on their way;
`is_made` when the last of them is; `done` when the host is through with it. With a baton, the next ones are chosen
while the last step runs and take over without the executor; without one, or in company, every grant is asked for and
ends with the next question.
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

_NAP_S = 50e-6  # between looks at the baton, while the device waits for it


class TurnToken:
    """The grants of one worker in one formation."""

    def __init__(
        self, say: Callable[[Message], None], baton: DeviceHandoff | None, signal: HandoffSignal | None
    ) -> None:
        self._say = say
        self._baton = baton
        self._signal = signal
        self._grants: deque[Grant] = deque()
        self._number = 0  # of the grant that holds
        self.left = 0  # steps of it
        self._has_asked = False
        self._behind = 0  # the device may still be waiting for the end of the grant of this number
        self._on_its_way = 0  # the grant whose end the device will say itself
        self._awaited = 0  # the host waits for its end before it tells the device more than the head of a step

    def take(self, grant: Grant) -> None:
        """Something was granted."""
        if self.left and self._number and grant.after == self._number:  # it comes after itself
            self.left += grant.steps
            self._number, self._has_asked = grant.number, False
        else:
            self._grants.append(grant)

    @property
    def is_spent(self) -> bool:
        """Whether a grant has to be handed on before anything else, once the device is through with its steps."""
        return bool(self._number) and not self.left

    @property
    def has_turn(self) -> bool:
        """Whether it computes, or may begin to without being told again."""
        return bool(self.left or self._number or self._grants)

    def hand_on(self, *, is_last: bool = False) -> None:
        """The device is through."""
        assert self._baton is not None
        self._baton.reach(self._number)
        self._say(TurnEnded(self._number, is_last))
        self._number = 0

    def end(self) -> None:
        """The training is over and the device through: what is left of the grant is not needed."""
        self.left = 0
        if self.is_spent:
            self.hand_on(is_last=True)

    def begins(self, step: int, *, queues: bool = True) -> bool:
        """Whether a step may begin now; asks for it if that has not been done.

        Not ``queues``: only the head of the step may be said to the device before it is free; `starts` waits for that.
        """
        if not self.left and self._grants and self._is_next(self._grants[0], queues):
            grant = self._grants.popleft()
            self.left, self._has_asked = grant.steps, False
            if self._baton is not None:
                self._number = grant.number
        if not self.left and not self._grants and not self._has_asked:
            self._say(TurnRequested(step))
            self._has_asked = True
        return self.left > 0

    def starts(self) -> None:
        """No more than its head has been said to the device of the step: return when the rest may be.

        Whoever comes next stays awake, and the device is its own a few microseconds after the last kernel in front.
        """
        while self._baton is not None and not self._baton.has_reached(self._awaited):
            os.sched_yield() if self._baton.has_reached(self._awaited - 1) else time.sleep(_NAP_S)

    def is_queued(self) -> None:
        """Most of a step's work has been said to the device: once it has begun, others may make ready for the next.

        The host sleeps until then: what would wait for the device instead, waits with all the power of a core.
        """
        while self._baton is not None and not self._baton.has_reached(self._behind):
            time.sleep(_NAP_S)
        if self._number and self.left == 1 and not self._grants and not self._has_asked:
            self._say(TurnEnding(self._number))
            self._has_asked = True

    def is_made(self) -> None:
        """All of a step has been said to the device, and nothing but another step follows: it can hand itself on.

        As soon as that can be said: where the host is behind its device, this is what the next one waits for.
        """
        if self._number and self.left == 1:
            self._hand_itself_on()

    def done(self, *, is_idle: bool) -> None:
        """A step was made; ``is_idle``: nothing but another step follows."""
        self.left -= 1
        if self.is_spent and is_idle:
            self._hand_itself_on()

    def _hand_itself_on(self) -> None:
        """Once for each grant: the next one may be through by then, and the number never goes back."""
        if self._signal is not None and self._on_its_way != self._number:
            self._signal.reach(self._number)
            self._on_its_way = self._number

    def wait(self, ear: int) -> None:
        """Wait until the baton may have moved, or something can be heard at a descriptor."""
        poll = select.poll()
        poll.register(ear, select.POLLIN)
        if self._grants and self._baton is not None:
            poll.register(self._baton.event, select.POLLIN)
        if any(fd != ear for fd, _ in poll.poll()) and self._baton is not None:
            self._baton.clear_event()

    def _is_next(self, grant: Grant, queues: bool) -> bool:
        if self._baton is None or self._baton.has_reached(grant.after):
            return True
        if self._signal is None:
            return False
        self._signal.hold_until(grant.after)
        self._behind = grant.after
        if not queues:
            self._awaited = grant.after
        return True


class TurnTokens:
    """What a worker takes turns with, in one formation after another."""

    def __init__(
        self,
        say: Callable[[Message], None],
        device: torch.device,
        baton: DeviceHandoff | None = None,
        grants: Iterable[Grant] = (),
    ) -> None:
        self._say = say
        self._baton = baton
        self._signal = None if baton is None else signal_of(baton, device)
        self._grants = list(grants)  # that came before the first formation

    def token(self, size: int) -> TurnToken:
        """The token of a place in a formation of so many; in company the executor hands every turn on."""
        token = TurnToken(self._say, self._baton if size == 1 else None, self._signal)
        while self._grants:
            token.take(self._grants.pop())
        return token
