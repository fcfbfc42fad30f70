"""Forked command: a Python program that runs in a fork of the fork server, under a reaper of its own.

The fork server forks a process, which checks that the program may run there and forks the reaper. The reaper leaves the
fork server's session, so that the command survives the fork server; it exits when the executor closes its lifeline.
"""

from __future__ import annotations

import os
import signal
import traceback
from pathlib import Path
from typing import NoReturn

from carpool.runtime.compat.process_lifetime import exit_with_parent, set_process_name
from carpool.runtime.process.channel import Channel
from carpool.runtime.process.protocol import Exited, Forked, RunProgram
from carpool.runtime.process.python_program import (
    PythonProgram,
    parse_program,
    problem_with_environment,
    problem_with_modules,
    run_program,
)
from carpool.runtime.process.reaper import NOT_STARTED, ForkedChild, supervise


def start_program(channel: Channel, request: RunProgram, fds: tuple[int, ...]) -> int:
    """In a fork of the fork server: start the reaper of a program, or answer why it needs a plain start."""
    program = parse_program(request.command)
    assert program is not None, "the executor has parsed it"
    if problem := _problem(program, request):
        channel.send(Forked(0, problem))
        return 0
    read_end, write_end = os.pipe()
    if not os.fork():
        os.close(read_end)
        _become_reaper(channel, program, request, fds, write_end)
    os.close(write_end)
    os.read(read_end, 1)  # wait until the reaper has left this session, which ends with this process
    return 0


def _problem(program: PythonProgram, request: RunProgram) -> str:
    folder = Path(request.folder)
    place = folder if program.is_module else (folder / program.target).resolve().parent
    environment = {name: value for name, value in request.environment.items() if name != "CARPOOL_CHANNEL"}
    return problem_with_environment(environment, os.environ) or problem_with_modules(place)


def _become_reaper(
    channel: Channel, program: PythonProgram, request: RunProgram, fds: tuple[int, ...], left: int
) -> NoReturn:
    log, lifeline, session = fds
    try:
        os.setsid()
        os.close(left)
        for stream in (1, 2):
            os.dup2(log, stream)
        os.close(log)
        if request.cores:
            os.sched_setaffinity(0, request.cores)
        channel.send(Forked(os.getpid()))
        code = supervise(lambda: _fork_program(program, request, session), lifeline, request.grace_s)
        channel.send(Exited(os.getpid(), code))
    except BaseException:  # noqa: BLE001 - nothing may reach the fork server's own frames
        traceback.print_exc()
    finally:
        os._exit(0)


def _fork_program(program: PythonProgram, request: RunProgram, session: int) -> ForkedChild:
    reaper = os.getpid()
    child = os.fork()
    if not child:
        _become_program(program, request, session, reaper)
    os.close(session)
    return ForkedChild(child)


def _become_program(program: PythonProgram, request: RunProgram, session: int, reaper: int) -> NoReturn:
    try:
        exit_with_parent(reaper)
        os.setsid()
        signal.set_wakeup_fd(-1)
        os.closerange(3, session)
        os.closerange(session + 1, os.sysconf("SC_OPEN_MAX"))
        os.set_inheritable(session, True)
        os.chdir(request.folder)
        set_process_name(Path(request.command[0]).name)
    except OSError:
        traceback.print_exc()
        os._exit(NOT_STARTED)
    run_program(program, request.command, {**request.environment, "CARPOOL_CHANNEL": str(session)})
