"""Entry check: calls every entry once in a fork of the fork server and reports errors before jobs start.

A process whose entry is fine waits for its job to start and becomes its worker, so that the first jobs call their
entries once. The output of the entry then goes to its job's log; otherwise it is discarded. An entry that takes too
long is not checked.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from carpool.jobs.program import Program
from carpool.runtime.compat.process_lifetime import set_process_name
from carpool.runtime.process.protocol import Begin, CheckEntry, EntryChecked, Message

if TYPE_CHECKING:
    from carpool.runtime.engine.training import Training

WorkerKey = tuple[str, int]

TIMEOUT_S = 20.0  # for all entries together, once torch is imported
_REPEATS_SHARE = 0.25  # of it, in which further jobs of the same entry are checked, too; a sweep can have many
_COPY_BYTES = 1 << 20
_DIED = "the process that called its entry ended, twice: by os._exit, a signal or out of memory"
_NO_JOB = ""  # in the key of a checking process; its number is negative, unlike that of a prewarmed process


class CheckStarter(Protocol):
    """Starts and kills processes; implemented by `WorkerPool`."""

    async def ready(self) -> None: ...

    def check(self, key: WorkerKey, request: CheckEntry) -> None: ...

    def kill(self, key: WorkerKey) -> None: ...


class EntryChecks:
    """Calls entries concurrently, each in its own process."""

    def __init__(self, starter: CheckStarter, threads: Callable[[Program], int], max_kept: int) -> None:
        self._starter = starter
        self._threads = threads  # that a job's worker is expected to have
        self._max_kept = max_kept
        self._last_number = 0
        self._answers: dict[WorkerKey, asyncio.Future[EntryChecked | None]] = {}  # None: it died without an answer
        self._kept: dict[str, tuple[WorkerKey, CheckEntry]] = {}  # by job
        self.fine: dict[str, EntryChecked] = {}  # by job, with the lengths of their trainings

    def owns(self, key: WorkerKey) -> bool:
        return key[0] == _NO_JOB and key[1] < 0

    def on_message(self, key: WorkerKey, message: Message) -> None:
        if isinstance(message, EntryChecked):
            self._settle(key, message)

    def on_exit(self, key: WorkerKey) -> None:
        self._settle(key, None)
        self._kept = {job: kept for job, kept in self._kept.items() if kept[0] != key}

    async def run(self, programs: Mapping[str, Program], timeout_s: float = TIMEOUT_S) -> dict[str, str]:
        """Call the entries. Returns each checked job's error, empty if there is none."""
        await self._starter.ready()
        if not programs:
            return {}
        queue, found = CheckQueue(programs), dict[str, str]()
        try:
            async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as running:
                until = asyncio.get_running_loop().time() + timeout_s * _REPEATS_SHARE
                for _ in range(len(os.sched_getaffinity(0))):
                    running.create_task(self._work(queue, until, found))
        except TimeoutError:
            pass
        return found

    def take(self, begin: Begin) -> WorkerKey | None:
        """The process that has called the entry of a job and can become this worker; None if there is none."""
        if begin.job not in self._kept:
            return None
        key, request = self._kept.pop(begin.job)
        if (request.program, request.threads) == (begin.program, begin.threads):
            return key
        self._starter.kill(key)
        return None

    def release_others(self, jobs: Collection[str]) -> None:
        """Kill the processes of all but these jobs: the others will not start soon."""
        for job in [job for job in self._kept if job not in jobs]:
            self._starter.kill(self._kept.pop(job)[0])

    async def _work(self, queue: CheckQueue, repeats_until: float, found: dict[str, str]) -> None:
        """Check one job after another."""
        now = asyncio.get_running_loop().time
        while job := queue.next(is_early=now() < repeats_until):
            name, program = job
            request = CheckEntry(name, asdict(program), self._threads(program))
            # a single death may not be the entry's fault
            answer = await self._check(request) or await self._check(request)
            found[name] = _DIED if answer is None else answer.error
            if answer is not None and not answer.error:
                self.fine[name] = answer

    async def _check(self, request: CheckEntry) -> EntryChecked | None:
        self._last_number -= 1
        key = (_NO_JOB, self._last_number)
        waiting: asyncio.Future[EntryChecked | None] = asyncio.get_running_loop().create_future()
        self._answers[key] = waiting
        self._starter.check(key, request)
        answer = None
        try:
            answer = await waiting
        finally:
            del self._answers[key]
            if answer is not None and answer.can_begin and len(self._kept) < self._max_kept:
                self._kept[request.job] = key, request
            else:
                self._starter.kill(key)
        return answer

    def _settle(self, key: WorkerKey, answer: EntryChecked | None) -> None:
        waiting = self._answers.get(key)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)


class CheckQueue:
    """Jobs to check: first one per entry, then further jobs of the same entries."""

    def __init__(self, programs: Mapping[str, Program]) -> None:
        first: dict[tuple[str, str], str] = {}
        for job, program in programs.items():
            first.setdefault((program.folder, program.entry), job)
        names = set(first.values())
        self._first = [(job, program) for job, program in programs.items() if job in names]
        self._repeats = [(job, program) for job, program in programs.items() if job not in names]

    def next(self, *, is_early: bool) -> tuple[str, Program] | None:
        """The next job; while `is_early`, also one whose entry has already been called for another job."""
        queue = self._first or (self._repeats if is_early else [])
        return queue.pop(0) if queue else None


class CheckedEntry(NamedTuple):
    """A training in the process that has called its entry."""

    training: Training | None  # None: the entry failed
    answer: EntryChecked
    output: int  # memory file with what it printed

    def write_output(self, log: int) -> None:
        """Copy to the job's log what the entry has printed, before the log becomes the process's output."""
        sys.stdout.flush()
        sys.stderr.flush()
        at = 0
        while piece := os.pread(self.output, _COPY_BYTES, at):
            at += os.write(log, piece)
        os.close(self.output)


def check_entry(request: CheckEntry) -> CheckedEntry:
    """In the process: do what a worker does before its first step, up to the last point where user code can fail."""
    from carpool.runtime.process.worker_setup import capture_output, checked_training, configure_job, most_steps
    from carpool.runtime.worker.error_classifier import describe_error

    program, training, error = Program(**request.program), None, ""
    set_process_name(f"check:{request.job}")
    output = capture_output(request.threads)
    try:
        configure_job(program)
        training = checked_training(program)
    except BaseException as raised:  # noqa: BLE001 - an entry may raise anything
        error = describe_error(raised)
    if training is None:
        return CheckedEntry(None, EntryChecked(error), output)
    batch_size = program.batch_size or training.batch_size
    length = most_steps(training, batch_size), batch_size, training.num_samples
    return CheckedEntry(training, EntryChecked("", not _uses_gpu(), *length), output)


def _uses_gpu() -> bool:
    """Whether this process has a GPU's device file open: its share of a GPU can no longer be chosen then."""
    files = [path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return any(str(file).startswith("/dev/nvidia") for file in files)
