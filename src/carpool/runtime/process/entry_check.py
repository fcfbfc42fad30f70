"""Entry check: calls every entry once in a fork of the fork server and reports errors before jobs start.

What entries print is discarded here: their jobs' logs have it. An entry that takes too long is not checked.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Protocol

from carpool.jobs.program import Program
from carpool.runtime.compat.process_lifetime import set_process_name
from carpool.runtime.process.protocol import CheckEntry, EntryChecked, Message

WorkerKey = tuple[str, int]

TIMEOUT_S = 20.0  # for all entries together, once torch is imported
_REPEATS_SHARE = 0.25  # of it, in which an entry is also called with the arguments of further jobs: sweeps may be long
_NO_JOB = ""  # in the key of a checking process; its number is negative, unlike that of a prewarmed process


class CheckStarter(Protocol):
    """Starts and kills processes; implemented by `WorkerPool`."""

    async def ready(self) -> None: ...

    def check(self, key: WorkerKey, request: CheckEntry, log: int) -> None: ...

    def kill(self, key: WorkerKey) -> None: ...


class EntryChecks:
    """Calls entries concurrently, each in its own process."""

    def __init__(self, starter: CheckStarter) -> None:
        self._starter = starter
        self._last_number = 0
        self._answers: dict[WorkerKey, asyncio.Future[str | None]] = {}  # None: the process died without a result

    def owns(self, key: WorkerKey) -> bool:
        return key[0] == _NO_JOB and key[1] < 0

    def on_message(self, key: WorkerKey, message: Message) -> None:
        if isinstance(message, EntryChecked):
            self._settle(key, message.error)

    def on_exit(self, key: WorkerKey) -> None:
        self._settle(key, None)

    async def run(self, programs: Mapping[str, Program], timeout_s: float = TIMEOUT_S) -> dict[str, str]:
        """Call the entries; an error by job, empty where there is none. Jobs that were not checked are left out."""
        await self._starter.ready()
        queue, found = CheckQueue(programs), dict[str, str]()
        silent = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        try:
            async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as running:
                until = asyncio.get_running_loop().time() + timeout_s * _REPEATS_SHARE
                for _ in range(len(os.sched_getaffinity(0))):
                    running.create_task(self._work(queue, until, silent, found))
        except TimeoutError:
            pass
        finally:
            os.close(silent)
        return found

    async def _work(self, queue: CheckQueue, repeats_until: float, log: int, found: dict[str, str]) -> None:
        """Check one job after another."""
        now = asyncio.get_running_loop().time
        while job := queue.next(is_early=now() < repeats_until):
            name, program = job
            result = await self._check(name, program, log)
            if result is not None:  # else its process died, which need not be its fault
                found[name] = result

    async def _check(self, job: str, program: Program, log: int) -> str | None:
        self._last_number -= 1
        key = (_NO_JOB, self._last_number)
        answer: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._answers[key] = answer
        self._starter.check(key, CheckEntry(job, asdict(program)), log)
        try:
            return await answer
        finally:
            self._answers.pop(key, None)
            self._starter.kill(key)

    def _settle(self, key: WorkerKey, result: str | None) -> None:
        answer = self._answers.get(key)
        if answer is not None and not answer.done():
            answer.set_result(result)


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
        """The next job; one whose entry has been called already only while it is early."""
        queue = self._first or (self._repeats if is_early else [])
        return queue.pop(0) if queue else None


def check_entry(request: CheckEntry) -> EntryChecked:
    """In the process: do what a worker does before its first step, as far as the user's code can fail."""
    import torch

    from carpool.runtime.engine.determinism import enable_determinism
    from carpool.runtime.process.worker_setup import check_training, enter_job_folder
    from carpool.runtime.worker.error_classifier import describe_error

    program = Program(**request.program)
    set_process_name(f"check:{request.job}")
    torch.set_num_threads(1)
    try:
        os.environ.update(program.environment)
        enable_determinism(deterministic=program.deterministic)
        enter_job_folder(program)
        check_training(program)
    except (Exception, SystemExit) as raised:  # noqa: BLE001 - an entry may raise anything
        return EntryChecked(describe_error(raised))
    return EntryChecked()
