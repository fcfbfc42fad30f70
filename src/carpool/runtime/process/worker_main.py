"""Main function of a worker process, from its first message to its exit code."""

from __future__ import annotations

import contextlib
import sys
from typing import NoReturn

from carpool.jobs.program import Program
from carpool.runtime.errors import LeaveRequested, StateLost
from carpool.runtime.memory.device_state import new_device_state
from carpool.runtime.process.channel import Channel, Closed, Heartbeat
from carpool.runtime.process.cuda_warmup import wait_for_job
from carpool.runtime.process.protocol import AdmissionRequested, Begin, Grant, Leave, Noted, Prewarm, WorkerFailed
from carpool.runtime.process.shared_memory import StepCounter, new_counter
from carpool.runtime.process.worker_setup import StartupTimer, configure_process, make_trainer, start_cuda_lane
from carpool.runtime.reduce.sync_batchnorm import sync_batch_norms
from carpool.runtime.sharing.device_handoff import DeviceHandoff
from carpool.runtime.sharing.turn_token import TurnTokens
from carpool.runtime.worker.error_classifier import (
    describe_error,
    failure_message,
    format_for_log,
    is_process_lost,
    root_cause,
)
from carpool.runtime.worker.worker import Worker

TORN = 3  # exit code of a worker with nothing to go on with: out of memory while loading or in an update, GPU lost


def main(channel: Channel) -> int:
    """Live the life of a worker at this end of a channel; the exit code."""
    with contextlib.suppress(Closed, LeaveRequested):
        received = channel.receive()
        assert received is not None
        was_warm = isinstance(received.message, Prewarm)
        if isinstance(received.message, Prewarm):
            received = wait_for_job(channel, received.message)
        assert isinstance(received.message, Begin), f"a worker's life starts with Begin, not {received.message}"
        begin = received.message
        program, arrival = Program(**begin.program), StartupTimer()
        try:
            configure_process(begin, program, received.fds[:1])
            if not was_warm:
                Heartbeat(channel, begin.heartbeat_s).start()
            if note := start_cuda_lane(begin):
                channel.send(Noted(note))
            arrival.passed("to settle in")
            grants: list[Grant] = []
            trainer = make_trainer(begin, program, arrival, lambda: _enter(channel, grants))
            channel.send(Noted(arrival.words()))
            norms = sync_batch_norms(program, trainer.training)
            residence = new_device_state(trainer, tolerant=not program.deterministic) if begin.memory_cap else None
            counter = StepCounter(received.fds[1] if received.fds[1:] else new_counter(begin.job))
        except (Exception, SystemExit) as raised:  # noqa: BLE001 - an entry may raise anything
            sys.stderr.write(format_for_log(raised))
            error = root_cause(raised)
            if is_process_lost(error):
                channel.send(failure_message(error, 0))
                return TORN
            channel.send(WorkerFailed("input", describe_error(error)))
            _await_leave(channel)
        try:
            baton = DeviceHandoff(*received.fds[2:4]) if received.fds[2:] else None
            tokens = TurnTokens(channel.send, trainer.device, baton, grants)
            Worker(channel, begin, program, trainer, counter, norms, tokens, residence).run()
        except StateLost:
            return TORN
    return 0


def _enter(channel: Channel, grants: list[Grant]) -> int:
    """Wait until a device under a cap has room; the bytes of it."""
    channel.send(AdmissionRequested())
    while not grants:
        received = channel.receive()
        assert received is not None, "without a timeout there is a message or an end"
        if isinstance(received.message, Leave):
            raise LeaveRequested
        if isinstance(received.message, Grant):
            grants.append(received.message)
    return grants[0].room


def _await_leave(channel: Channel) -> NoReturn:
    while True:
        received = channel.receive()
        if received is not None and isinstance(received.message, Leave):
            raise LeaveRequested
