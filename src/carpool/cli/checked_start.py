"""An executor that is started only where every entry can be called: what raises is told before anything begins."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from carpool.core.errors import CarpoolError, InputError

if TYPE_CHECKING:
    from carpool.backends.local import ExecutorPort
    from carpool.backends.running import StartLink
    from carpool.runtime.devices import LocalDevice
    from carpool.runtime.jobfile import Listed

_TOLD = 3  # jobs that are named


async def start_checked(
    devices: Sequence[LocalDevice], state: Path, *, start: StartLink, jobs: Sequence[Listed]
) -> ExecutorPort:
    """The executor, once every entry was called: both begin by importing torch, at the same time."""
    starting = asyncio.ensure_future(start(devices, state))
    checking = asyncio.ensure_future(check_entries(jobs))
    try:
        await asyncio.gather(starting, checking)
    except BaseException:
        checking.cancel()
        starting.cancel()
        with suppress(asyncio.CancelledError, CarpoolError):
            await (await starting).stop(checkpoint=False)
        raise
    return starting.result()


async def check_entries(jobs: Sequence[Listed]) -> None:
    """InputError where an entry raises, or returns what could not begin."""
    from carpool.runtime.entry_check import try_entries

    tried = await try_entries(jobs)
    if tried.untried:
        click.echo(f"carpool: not checked beforehand, for want of time: {_some(tried.untried)}", err=True)
    for job, problem in tried.problems.items():
        others = [other for other in tried.problems if other != job]
        raise InputError(
            problem,
            where=f"job {job!r}",
            way_out=f"So it is with {len(others)} more: {_some(others)}." if others else "",
        )


def _some(jobs: Sequence[str]) -> str:
    return ", ".join(jobs[:_TOLD]) + (", …" if len(jobs) > _TOLD else "")
