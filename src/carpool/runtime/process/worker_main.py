"""Main function of a worker process, from its first message to its exit code."""

from __future__ import annotations

import contextlib
import sys
from typing import NoReturn

import torch

from carpool.jobs.program import Program
from carpool.runtime.errors import LeaveRequested, StateLost
from carpool.runtime.memory.device_state import new_device_state
from carpool.runtime.process.channel import Channel, Closed, Heartbeat, Received
from carpool.runtime.process.cuda_warmup import wait_for_job
from carpool.runtime.process.entry_check import CheckedEntry, check_entry
from carpool.runtime.process.forked_command import start_program
from carpool.runtime.process.protocol import (
    AdmissionRequested,
    Begin,
    CheckEntry,
    Grant,
    HostTasks,
    Leave,
    Noted,
    Prewarm,
    RunProgram,
    WorkerFailed,
)
from carpool.runtime.process.shared_memory import StepCounter, new_step_counter
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

STATE_LOST = 3  # exit code after an error that left no usable state: out of memory in an update, GPU lost


def main(channel: Channel) -> int:
    """Run a worker on this end of a channel. Returns its exit code."""
    with contextlib.suppress(Closed, LeaveRequested):
        first = channel.receive()
        assert first is not None
        if isinstance(first.message, RunProgram):
            return start_program(channel, first.message, first.fds)
        if isinstance(first.message, HostTasks):
            from carpool.runtime.federation.device_worker import host_tasks

            return host_tasks(channel, first.message)
        checked = None
        received, was_prewarmed = first, isinstance(first.message, Prewarm)
        if isinstance(first.message, Prewarm):
            received = wait_for_job(channel, first.message)
        elif isinstance(first.message, CheckEntry):
            checked = check_entry(first.message)
            channel.send(checked.answer)
            received = _await_begin(channel)
        assert isinstance(received.message, Begin), f"expected Begin, got {received.message}"
        grants: list[Grant] = []
        try:
            worker = _set_up(channel, received, grants, checked, was_prewarmed=was_prewarmed)
            worker.announce()
        except (Closed, LeaveRequested):
            raise
        except BaseException as raised:  # noqa: BLE001 - an entry may raise anything
            sys.stderr.write(format_for_log(raised))
            error = root_cause(raised)
            if is_process_lost(error):
                channel.send(failure_message(error, 0))
                return STATE_LOST
            channel.send(WorkerFailed("input", describe_error(error)))
            _await_leave(channel)
        try:
            worker.run()
        except StateLost:
            return STATE_LOST
    return 0


def _await_begin(channel: Channel) -> Received:
    received = channel.receive()
    assert received is not None, "without a timeout there is a message or an end"
    if isinstance(received.message, Leave):
        raise LeaveRequested
    return received


def _set_up(
    channel: Channel, received: Received, grants: list[Grant], checked: CheckedEntry | None, *, was_prewarmed: bool
) -> Worker:
    begin, fds = received.message, received.fds
    assert isinstance(begin, Begin)
    program, timer = Program(**begin.program), StartupTimer()
    if checked is not None:
        checked.write_output(fds[0])
    configure_process(begin, program if checked is None else None, fds[:1])
    if not was_prewarmed:
        Heartbeat(channel, begin.heartbeat_s).start()
    if note := start_cuda_lane(torch.device(begin.device), begin.environment):
        channel.send(Noted(note))
    timer.lap("process setup")
    training = None if checked is None else checked.training
    trainer = make_trainer(begin, program, timer, lambda: _await_admission(channel, grants), training)
    channel.send(Noted(timer.summary()))
    norms = sync_batch_norms(program, trainer.training)
    device_state = new_device_state(trainer, tolerant=not program.deterministic) if begin.memory_cap else None
    counter = StepCounter(fds[1] if fds[1:] else new_step_counter(begin.job))
    handoff = DeviceHandoff(*fds[2:4]) if fds[2:] else None
    tokens = TurnTokens(channel.send, trainer.device, handoff, grants)
    return Worker(channel, begin, program, trainer, counter, norms, tokens, device_state)


def _await_admission(channel: Channel, grants: list[Grant]) -> int:
    """Wait until a device under a memory cap has room. Returns its free bytes."""
    channel.send(AdmissionRequested())
    while not grants:
        received = channel.receive()
        assert received is not None, "without a timeout there is a message or an end"
        if isinstance(received.message, Leave):
            raise LeaveRequested
        if isinstance(received.message, Grant):
            grants.append(received.message)
    return grants[0].free_bytes


def _await_leave(channel: Channel) -> NoReturn:
    while True:
        received = channel.receive()
        if received is not None and isinstance(received.message, Leave):
            raise LeaveRequested
