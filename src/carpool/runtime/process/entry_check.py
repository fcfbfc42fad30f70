"""Entry check: calls every entry once in a forked process and reports errors before jobs start.

A separate process imports torch, while the fork server does the same, and forks a child per entry. What entries print
is discarded here: their jobs' logs have it. An entry that takes too long is not checked.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from carpool.core.model import JobId
from carpool.jobs.job_file import ListedJob
from carpool.jobs.program import Program
from carpool.runtime.compat.process_lifetime import exit_with_parent, set_process_name
from carpool.runtime.process.child_process import ChildProcess, receive_frame, send_frame

TIMEOUT_S = 20.0  # for all entries together, once torch is imported
_REPEATS_SHARE = 0.25  # of it, in which an entry is also called with the arguments of further jobs: sweeps may be long
_OK = b"ok"


@dataclass(frozen=True, slots=True)
class EntryCheckResult:
    """Errors by job, and the jobs whose entry was not checked."""

    problems: dict[JobId, str] = field(default_factory=dict)
    unchecked: tuple[JobId, ...] = ()


async def call_entries(jobs: Sequence[ListedJob], timeout_s: float = TIMEOUT_S) -> EntryCheckResult:
    """Call the entry of every job that has one, as its worker will do."""
    asked = {str(spec.id): program.as_json() for spec, program in jobs if program.entry}
    if not asked:
        return EntryCheckResult()
    command = [sys.executable, "-P", "-m", "carpool.runtime.process.entry_check", str(os.getpid()), str(timeout_s)]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, process_group=0)
    try:
        output, _ = await process.communicate(json.dumps(asked).encode())
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    found = json.loads(output) if process.returncode == 0 else {}
    problems = {JobId(job): problem for job, problem in found.items() if problem}
    return EntryCheckResult(problems, tuple(JobId(job) for job in asked if job not in found))


class EntryChecks:
    """Calls entries concurrently, each in its own process."""

    def __init__(self, programs: Mapping[str, Program]) -> None:
        self._first, self._repeats = _split_by_entry(programs)
        self._running: dict[int, tuple[str, ChildProcess]] = {}
        self._poll = select.poll()
        self.found: dict[str, str] = {}  # error by job; empty: the entry is fine

    def run(self, timeout_s: float) -> None:
        max_running = len(os.sched_getaffinity(0))
        until = time.monotonic() + timeout_s
        while (left_s := until - time.monotonic()) > 0.0:
            is_early = left_s > (1.0 - _REPEATS_SHARE) * timeout_s
            while len(self._running) < max_running and (job := self.next(is_early=is_early)):
                self._start(*job)
            if not self._running:
                break
            for end, _ in self._poll.poll(1e3 * left_s):
                self._finish(end)
        for _, child in self._running.values():
            _kill(child)

    def next(self, *, is_early: bool) -> tuple[str, Program] | None:
        """The next job to check: first one per entry, then, while it is early, further jobs of the same entries."""
        queue = self._first or (self._repeats if is_early else [])
        return queue.pop(0) if queue else None

    def _start(self, job: str, program: Program) -> None:
        child = ChildProcess(f"check:{job}", functools.partial(_call, program))
        self._running[child.socket.fileno()] = (job, child)
        self._poll.register(child.socket, select.POLLIN)

    def _finish(self, end: int) -> None:
        job, child = self._running.pop(end)
        self._poll.unregister(end)
        result = receive_frame(child.socket)
        _kill(child)
        if result:  # else it died without a result, which need not be its fault
            self.found[job] = "" if result == _OK else result.decode("utf-8", "replace")


def _kill(child: ChildProcess) -> None:
    with suppress(ProcessLookupError, PermissionError):  # it may not lead its session yet
        os.killpg(child.pid, signal.SIGKILL)
    child.close()


_Jobs = list[tuple[str, Program]]


def _split_by_entry(programs: Mapping[str, Program]) -> tuple[_Jobs, _Jobs]:
    """The first job of each entry, and further ones with other arguments."""
    first: dict[tuple[str, str], str] = {}
    for job, program in programs.items():
        first.setdefault((program.folder, program.entry), job)
    names = set(first.values())
    jobs = programs.items()
    return [(job, program) for job, program in jobs if job in names], [
        (job, program) for job, program in jobs if job not in names
    ]


def _call(program: Program, end: socket.socket) -> None:
    """In the child: do what a worker does before its first step, as far as the user's code can fail."""
    from carpool.runtime.engine.determinism import enable_determinism
    from carpool.runtime.process.worker_setup import check_training, enter_job_folder
    from carpool.runtime.worker.error_classifier import describe_error

    os.setsid()
    devnull = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(devnull, stream)
    try:
        os.environ.update(program.environment)
        enable_determinism(deterministic=program.deterministic)
        enter_job_folder(program)
        check_training(program)
    except (Exception, SystemExit) as raised:  # noqa: BLE001 - an entry may raise anything
        send_frame(end, describe_error(raised).encode())
    else:
        send_frame(end, _OK)


def main() -> int:
    """``python -m carpool.runtime.process.entry_check PARENT SECONDS``: reads programs by job, writes errors by job."""
    exit_with_parent(int(sys.argv[1]))
    set_process_name("carpool-check")
    programs = {job: Program.from_json(value) for job, value in json.load(sys.stdin).items()}
    import torch

    import carpool.runtime.process.worker_setup  # noqa: F401 - once, before all forks

    torch.set_num_threads(1)
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)  # the first optimizer imports much of torch
    entries = EntryChecks(programs)
    entries.run(float(sys.argv[2]))
    sys.stdout.write(json.dumps(entries.found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
