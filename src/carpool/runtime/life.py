"""A worker process, from its first word to its exit code."""

from __future__ import annotations

import contextlib
import sys
from typing import NoReturn

from carpool.runtime.arrival import ArrivalClock
from carpool.runtime.baton import Baton
from carpool.runtime.channel import Channel, Closed
from carpool.runtime.counter import StepCounter, new_counter
from carpool.runtime.errors import Left, Torn
from carpool.runtime.heartbeat import Heartbeat
from carpool.runtime.jointnorm import joint_norms
from carpool.runtime.mishap import as_logged, broke, is_lost, really, told
from carpool.runtime.prepare import make_trainer, settle_in, take_lane
from carpool.runtime.program import Program
from carpool.runtime.protocol import Arrived, Begin, Broke, Grant, Leave, Noted, Warm
from carpool.runtime.residence import residence_of
from carpool.runtime.token import Tokens
from carpool.runtime.warming import sit
from carpool.runtime.worker import Worker

TORN = 3  # exit code of a worker with nothing to go on with: out of memory while loading or in an update, GPU lost


def main(channel: Channel) -> int:
    """Live the life of a worker at this end of a channel; the exit code."""
    with contextlib.suppress(Closed, Left):
        received = channel.receive()
        assert received is not None
        was_warm = isinstance(received.message, Warm)
        if isinstance(received.message, Warm):
            received = sit(channel, received.message)
        assert isinstance(received.message, Begin), f"a worker's life starts with Begin, not {received.message}"
        begin = received.message
        program, arrival = Program(**begin.program), ArrivalClock()
        try:
            settle_in(begin, program, received.fds[:1])
            if not was_warm:
                Heartbeat(channel, begin.heartbeat_s).start()
            if note := take_lane(begin):
                channel.send(Noted(note))
            arrival.passed("to settle in")
            grants: list[Grant] = []
            trainer = make_trainer(begin, program, arrival, lambda: _enter(channel, grants))
            channel.send(Noted(arrival.words()))
            norms = joint_norms(program, trainer.training)
            residence = residence_of(trainer, loosely=not program.deterministic) if begin.memory_cap else None
            counter = StepCounter(received.fds[1] if received.fds[1:] else new_counter(begin.job))
        except (Exception, SystemExit) as raised:  # noqa: BLE001 - an entry may raise anything
            sys.stderr.write(as_logged(raised))
            error = really(raised)
            if is_lost(error):
                channel.send(broke(error, 0))
                return TORN
            channel.send(Broke("input", told(error)))
            _await_dismissal(channel)
        try:
            baton = Baton(*received.fds[2:4]) if received.fds[2:] else None
            tokens = Tokens(channel.send, trainer.device, baton, grants)
            Worker(channel, begin, program, trainer, counter, norms, tokens, residence).run()
        except Torn:
            return TORN
    return 0


def _enter(channel: Channel, grants: list[Grant]) -> int:
    """Wait until a device under a cap has room; the bytes of it."""
    channel.send(Arrived())
    while not grants:
        received = channel.receive()
        assert received is not None, "without a timeout there is a message or an end"
        if isinstance(received.message, Leave):
            raise Left
        if isinstance(received.message, Grant):
            grants.append(received.message)
    return grants[0].room


def _await_dismissal(channel: Channel) -> NoReturn:
    while True:
        received = channel.receive()
        if received is not None and isinstance(received.message, Leave):
            raise Left
