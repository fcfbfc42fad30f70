"""Entry check: calls every entry once in a forked process and reports errors before jobs start.

A process of its own imports torch, while the executor does the same, and forks one for each entry. What entries print
is kept from the terminal: it is in the jobs' logs when they run. An entry that takes too long is left to its job.
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

PATIENCE_S = 20.0  # for all of them together, once torch is imported
_FURTHER = 0.25  # of it, in which an entry is also called with the arguments of further jobs: sweeps may be long
_FINE = b"fine"


@dataclass(frozen=True, slots=True)
class EntryCheckResult:
    """What came of calling entries: problems by job, and the jobs of which nothing is known."""

    problems: dict[JobId, str] = field(default_factory=dict)
    untried: tuple[JobId, ...] = ()


async def call_entries(jobs: Sequence[ListedJob], patience_s: float = PATIENCE_S) -> EntryCheckResult:
    """Call the entry of every job that has one, as its worker will."""
    asked = {str(spec.id): program.as_json() for spec, program in jobs if program.entry}
    if not asked:
        return EntryCheckResult()
    words = [sys.executable, "-P", "-m", "carpool.runtime.process.entry_check", str(os.getpid()), str(patience_s)]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*words, stdin=pipe, stdout=pipe, process_group=0)
    try:
        said, _ = await process.communicate(json.dumps(asked).encode())
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    found = json.loads(said) if process.returncode == 0 else {}
    problems = {JobId(job): problem for job, problem in found.items() if problem}
    return EntryCheckResult(problems, tuple(JobId(job) for job in asked if job not in found))


# -------------------------------------------------------------------------------------------------- the process itself


class EntryChecks:
    """Some entries that are called at the same time, each in a process of its own."""

    def __init__(self, programs: Mapping[str, Program]) -> None:
        self._waiting, self._further = _each_entry_first(programs)
        self._running: dict[int, tuple[str, ChildProcess]] = {}
        self._poll = select.poll()
        self.found: dict[str, str] = {}  # by job; empty: nothing is wrong with it

    def go(self, patience_s: float) -> None:
        """Call one after another until all are through, or time is over."""
        most = len(os.sched_getaffinity(0))
        until = time.monotonic() + patience_s
        while (left_s := until - time.monotonic()) > 0.0:
            while len(self._running) < most and (each := self.next(is_early=left_s > (1.0 - _FURTHER) * patience_s)):
                self._begin(*each)
            if not self._running:
                break
            for end, _ in self._poll.poll(1e3 * left_s):
                self._hear(end)
        for _, child in self._running.values():
            _end(child)

    def next(self, *, is_early: bool) -> tuple[str, Program] | None:
        """Whose entry is to be called next: one of each first, then, while it is early, further jobs of the same."""
        queue = self._waiting or (self._further if is_early else [])
        return queue.pop(0) if queue else None

    def _begin(self, job: str, program: Program) -> None:
        child = ChildProcess(f"try:{job}", functools.partial(_call, program))
        self._running[child.socket.fileno()] = (job, child)
        self._poll.register(child.socket, select.POLLIN)

    def _hear(self, end: int) -> None:
        job, child = self._running.pop(end)
        self._poll.unregister(end)
        said = receive_frame(child.socket)
        _end(child)
        if said:  # else it died before it could say anything, which need not be its fault
            self.found[job] = "" if said == _FINE else said.decode("utf-8", "replace")


def _end(child: ChildProcess) -> None:
    """End it, and what its entry has started and left in its session."""
    with suppress(ProcessLookupError, PermissionError):  # it may not have come to lead one
        os.killpg(child.pid, signal.SIGKILL)
    child.close()


_Jobs = list[tuple[str, Program]]


def _each_entry_first(programs: Mapping[str, Program]) -> tuple[_Jobs, _Jobs]:
    """The first job of each entry, and further ones with other arguments."""
    first: dict[tuple[str, str], str] = {}
    for job, program in programs.items():
        first.setdefault((program.folder, program.entry), job)
    some = set(first.values())
    return [each for each in programs.items() if each[0] in some], [e for e in programs.items() if e[0] not in some]


def _call(program: Program, end: socket.socket) -> None:
    """In a process of its own: do what a worker does before its first step that can go wrong by the user's words."""
    from carpool.runtime.engine.determinism import enable_determinism
    from carpool.runtime.process.worker_setup import check_training, enter_job_folder
    from carpool.runtime.worker.error_classifier import describe_error

    os.setsid()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    try:
        os.environ.update(program.environment)
        enable_determinism(deterministic=program.deterministic)
        enter_job_folder(program)
        check_training(program)
    except (Exception, SystemExit) as raised:  # noqa: BLE001 - an entry may raise anything
        send_frame(end, describe_error(raised).encode())
    else:
        send_frame(end, _FINE)


def main() -> int:
    """``python -m carpool.runtime.process.entry_check PARENT SECONDS``: programs by job come in, problems by job go out."""
    exit_with_parent(int(sys.argv[1]))
    set_process_name("carpool-check")
    programs = {job: Program.from_json(value) for job, value in json.load(sys.stdin).items()}
    import torch

    import carpool.runtime.process.worker_setup  # noqa: F401 - before all forks, and not in each of them

    torch.set_num_threads(1)
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)  # the first optimizer imports much of torch
    entries = EntryChecks(programs)
    entries.go(float(sys.argv[2]))
    sys.stdout.write(json.dumps(entries.found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
