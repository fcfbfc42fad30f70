"""``carpool serve``: a daemon that takes jobs in as they come, and goes on where it was when it was killed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from carpool import __version__
from carpool.cli.run import PREFERRED, default_policy

if TYPE_CHECKING:
    from carpool.service.house import House

_EPILOG = """\b
Examples:
  carpool serve
  carpool serve --devices cuda --policy carpool --state /var/lib/carpool
  carpool serve --leave-running     (SIGTERM leaves the jobs at work for the next daemon: an upgrade stops none)
"""


@click.command("serve", epilog=_EPILOG)
@click.option("--state", metavar="DIR", help="Where the journal, logs and checkpoints are. [default: the user's state]")
@click.option(
    "--policy",
    metavar="NAME[:key=value]…",
    help=f"Who runs where. [default: the one that decided last here, at first {PREFERRED[0]}]",
)
@click.option(
    "--devices",
    default="",
    metavar="SPEC",
    help="cpu:4, cpu:2x1,1x2, cuda, cuda:0,1. [default: all GPUs, else all cores]",
)
@click.option("--oversubscribe", is_flag=True, help="Let devices of cpu:CxK share cores.")
@click.option(
    "--lanes",
    type=click.Choice(["auto", "slice"]),
    default="auto",
    show_default=True,
    help="auto: jobs that share a GPU compute at the same time where that can be; slice: they take turns.",
)
@click.option(
    "--warm",
    type=click.IntRange(0, 8),
    default=1,
    show_default=True,
    help="Processes kept ready on each GPU, so that a job need not wait for CUDA; each takes up a context there.",
)
@click.option(
    "--memory-cap",
    default="",
    metavar="SIZE",
    help="Let the jobs on each device take no more than this together: they take turns, and park in host memory.",
)
@click.option("--leave-running", is_flag=True, help="When it is stopped, leave the jobs at work for the next daemon.")
def command(
    state: str | None,
    policy: str | None,
    devices: str,
    oversubscribe: bool,
    lanes: str,
    warm: int,
    memory_cap: str,
    leave_running: bool,
) -> int:
    """Serve jobs until SIGTERM or Ctrl-C.

    Everything accepted is on disk before it is answered. When the daemon is killed, its jobs stand still at the end of
    a step, checkpointed, and the next daemon on the same folder goes on with them. When it is stopped, all jobs are
    halted with checkpoints, and the next one resumes them.
    """
    from carpool.core.units import parse_bytes
    from carpool.runtime.devices import overlap_note, parse_devices
    from carpool.runtime.link import ExecutorOptions
    from carpool.service.house import House, Setup

    found = tuple(parse_devices(devices, oversubscribe=oversubscribe))
    if note := overlap_note(found):
        click.echo(f"carpool: {note}", err=True)
    cap = parse_bytes(memory_cap, "--memory-cap") if memory_cap else 0
    options = ExecutorOptions(mps=lanes == "auto", warm=warm, memory_cap=cap)
    folder = Path(state) if state else default_state()
    house = House.open(Setup(folder.absolute(), found, __version__, policy or "", default_policy(), options))
    try:
        asyncio.run(_serve(house, leave_running=leave_running))
    finally:
        house.close()
    return 0


def default_state() -> Path:
    """Where a user's daemon keeps what it must not lose."""
    root = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(root) / "carpool"


async def _serve(house: House, *, leave_running: bool) -> None:
    await house.start()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(name, _stop, house, leave_running)
    async with mounted(house) as address:
        for words in house.told:
            click.echo(f"carpool: {words}", err=True)
        jobs = len(house.scheduler.jobs)
        where = f", listens at {address}" if address else ""
        click.echo(
            f"carpool: serves {len(house.names)} device{'s' if len(house.names) != 1 else ''} from {house.setup.state}"
            f" with policy {house.policy_text}{where}; {jobs} job{'s' if jobs != 1 else ''} to go on with",
            err=True,
        )
        await house.run()


def _stop(house: House, leave_running: bool) -> None:
    words = "leaves its jobs at work for the next daemon" if leave_running else "halts all jobs with checkpoints"
    click.echo(f"carpool: {words}", err=True)
    house.stop(leave_running=leave_running)


@asynccontextmanager
async def mounted(house: House) -> AsyncIterator[str]:
    """Where people reach the daemon: what listens begins and ends here, around the daemon's run; its address."""
    yield ""
