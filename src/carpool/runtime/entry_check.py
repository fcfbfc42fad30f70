"""Calls every entry once before anything starts: what one raises is told then, and not when its job's turn comes.

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
from carpool.runtime.child import Child
from carpool.runtime.deathbed import call_oneself, die_with
from carpool.runtime.framing import receive, write
from carpool.runtime.jobfile import Listed
from carpool.runtime.program import Program

PATIENCE_S = 20.0  # for all of them together, once torch is imported
_FURTHER = 0.25  # of it, in which an entry is also called with the arguments of further jobs: sweeps may be long
_FINE = b"fine"


@dataclass(frozen=True, slots=True)
class EntriesTried:
    """What came of calling entries: problems by job, and the jobs of which nothing is known."""

    problems: dict[JobId, str] = field(default_factory=dict)
    untried: tuple[JobId, ...] = ()


async def try_entries(jobs: Sequence[Listed], patience_s: float = PATIENCE_S) -> EntriesTried:
    """Call the entry of every job that has one, as its worker will."""
    asked = {str(spec.id): program.as_json() for spec, program in jobs if program.entry}
    if not asked:
        return EntriesTried()
    words = [sys.executable, "-P", "-m", "carpool.runtime.entry_check", str(os.getpid()), str(patience_s)]
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
    return EntriesTried(problems, tuple(JobId(job) for job in asked if job not in found))


# -------------------------------------------------------------------------------------------------- the process itself


class EntryCalls:
    """Some entries that are called at the same time, each in a process of its own."""

    def __init__(self, programs: Mapping[str, Program]) -> None:
        self._waiting, self._further = _each_entry_first(programs)
        self._running: dict[int, tuple[str, Child]] = {}
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
        child = Child(f"try:{job}", functools.partial(_call, program))
        self._running[child.socket.fileno()] = (job, child)
        self._poll.register(child.socket, select.POLLIN)

    def _hear(self, end: int) -> None:
        job, child = self._running.pop(end)
        self._poll.unregister(end)
        said = receive(child.socket)
        _end(child)
        if said:  # else it died before it could say anything, which need not be its fault
            self.found[job] = "" if said == _FINE else said.decode("utf-8", "replace")


def _end(child: Child) -> None:
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
    from carpool.runtime.mishap import told
    from carpool.runtime.prepare import check_training, stand_where_asked
    from carpool.runtime.seeding import settle

    os.setsid()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    try:
        os.environ.update(program.environment)
        settle(deterministic=program.deterministic)
        stand_where_asked(program)
        check_training(program)
    except (Exception, SystemExit) as raised:  # noqa: BLE001 - an entry may raise anything
        write(end, told(raised).encode())
    else:
        write(end, _FINE)


def main() -> int:
    """``python -m carpool.runtime.entry_check PARENT SECONDS``: programs by job come in, problems by job go out."""
    die_with(int(sys.argv[1]))
    call_oneself("carpool-check")
    programs = {job: Program.from_json(value) for job, value in json.load(sys.stdin).items()}
    import torch

    import carpool.runtime.prepare  # noqa: F401 - before all forks, and not in each of them

    torch.set_num_threads(1)
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)  # the first optimizer imports much of torch
    entries = EntryCalls(programs)
    entries.go(float(sys.argv[2]))
    sys.stdout.write(json.dumps(entries.found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
