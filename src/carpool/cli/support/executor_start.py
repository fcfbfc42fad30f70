"""Executor start: launch the executor of a run and check the entries of its jobs before any of them starts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from carpool.core.errors import InputError
from carpool.core.typed_fields import shortened

if TYPE_CHECKING:
    from carpool.jobs.devices import LocalDevice
    from carpool.jobs.job_file import ListedJob
    from carpool.runtime.executor.client import ExecutorClient, ExecutorOptions
    from carpool.runtime.process.launch import Launched

    StartClient = Callable[[Sequence[LocalDevice], Path], Awaitable[ExecutorClient]]

_MAX_NAMED = 3  # jobs in a message
_MAX_ERRORS = 10  # distinct errors of entries that are printed in full
_MAX_SHORT = 200  # characters of the others


async def start_executor(
    devices: Sequence[LocalDevice],
    state: Path,
    *,
    lanes: str = "auto",
    warm: int = 0,
    reducer: str = "shared",
    memory_cap: int = 0,
    launched: Launched | None = None,
) -> ExecutorClient:
    """Claim the executor process that was launched, or start one, without waiting until it can launch workers."""
    from carpool.runtime.executor.client import ExecutorClient

    options = executor_options(lanes, warm, reducer, memory_cap)
    return await ExecutorClient.start(devices, state, options=options, launched=launched, wait=False)


def executor_options(lanes: str, warm: int, reducer: str, memory_cap: int) -> ExecutorOptions:
    """The options of executors that run a fixed list of jobs."""
    from carpool.runtime.executor.client import ExecutorOptions

    return ExecutorOptions(
        mps=lanes == "auto",
        warm=warm,
        is_closed=True,
        reducer=reducer,
        memory_cap=memory_cap,
    )


async def start_ready(
    devices: Sequence[LocalDevice],
    state: Path,
    *,
    start: StartClient,
    check: Sequence[ListedJob] = (),
) -> ExecutorClient:
    """Start the executor and wait until it can launch workers and has checked the entries of some jobs."""
    executor = await start(devices, state)
    try:
        await check_entries(executor, check)
    except BaseException:
        await executor.stop(checkpoint=False)
        raise
    return executor


async def check_entries(executor: ExecutorClient, jobs: Sequence[ListedJob]) -> None:
    """InputError with every distinct error of entries that raise, or return something other than a valid training."""
    from carpool.runtime.process.entry_check import TIMEOUT_S

    programs = {spec.id: program for spec, program in jobs if program.entry}
    errors = await executor.check(programs, TIMEOUT_S)
    unchecked = [job for job in programs if job not in errors]
    if unchecked:
        click.echo(
            f"carpool: skipped the entry check of {_some(unchecked)} (took longer than {TIMEOUT_S:g} s)", err=True
        )
    jobs_of: dict[str, list[str]] = {}  # by error
    for job in programs:
        if problem := errors.get(job):
            jobs_of.setdefault(problem, []).append(job)
    if jobs_of:
        found = [f"job {_quoted(jobs)}: {problem}" for problem, jobs in jobs_of.items()]
        others = [shortened(" ".join(error.split()), _MAX_SHORT) for error in found[_MAX_ERRORS:]]
        raise InputError("\n".join([*found[:_MAX_ERRORS], *others]))


def _quoted(jobs: Sequence[str]) -> str:
    return _some([repr(job) for job in jobs]) + (f" ({len(jobs)} jobs)" if len(jobs) > 1 else "")


def _some(jobs: Sequence[str]) -> str:
    return ", ".join(jobs[:_MAX_NAMED]) + (", …" if len(jobs) > _MAX_NAMED else "")
