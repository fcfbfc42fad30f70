"""``carpool serve``: run the daemon, which accepts jobs over its API and resumes them after a crash."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from carpool import __version__
from carpool.cli.verbs.run import PREFERRED, default_policy
from carpool.core.errors import InputError

if TYPE_CHECKING:
    from carpool.service.daemon.bootstrap import DaemonInstance
    from carpool.service.http.metrics import ServiceMetrics


_EPILOG = """\b
Examples:
  carpool serve
  carpool serve --devices cuda --policy carpool --state /var/lib/carpool
  carpool serve --host 0.0.0.0 --tls-cert box.pem --tls-key box.key
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
    default=None,
    metavar="SPEC",
    help="cpu:4, cpu:2x1,1x2, cuda, cuda:0,1. [default: all GPUs, else all cores]",
)
@click.option("--oversubscribe", is_flag=True, help="Let devices of cpu:CxK share cores.")
@click.option(
    "--lanes",
    type=click.Choice(["auto", "slice"]),
    default=None,
    help="auto: jobs that share a GPU compute at the same time where that can be; slice: they take turns.",
)
@click.option(
    "--warm",
    type=click.IntRange(0, 8),
    default=None,
    help="Processes kept ready on each GPU, so that a job need not wait for CUDA; each takes up a context there. "
    "[default: 1]",
)
@click.option(
    "--memory-cap",
    default=None,
    metavar="SIZE",
    help="Let the jobs on each device take no more than this together: they take turns, and park in host memory.",
)
@click.option("--socket", default=None, metavar="PATH", help="Its Unix socket. [default: api.sock in its folder]")
@click.option("--host", default=None, help="Where it listens besides. [default: 127.0.0.1]")
@click.option("--port", default=None, type=click.IntRange(0, 65535), help="The port there; 0: none. [default: 7637]")
@click.option("--tls-cert", default=None, metavar="FILE", help="A certificate (PEM): the port speaks https then.")
@click.option("--tls-key", default=None, metavar="FILE", help="Its key (PEM).")
@click.option(
    "--insecure-http",
    is_flag=True,
    flag_value=True,
    default=None,
    help="Listen beyond loopback without a certificate: whoever is in between reads tokens.",
)
@click.option("--leave-running", is_flag=True, help="When it is stopped, leave the jobs at work for the next daemon.")
def serve(oversubscribe: bool, leave_running: bool, **flags: Any) -> int:
    """Serve jobs until SIGTERM or Ctrl-C.

    Everything accepted is on disk before it is answered. When the daemon is killed, its jobs stand still at the end of
    a step, checkpointed, and the next daemon on the same folder goes on with them. When it is stopped, all jobs are
    halted with checkpoints, and the next one resumes them.

    People reach it over its Unix socket, as the daemon's own user, and over a port with a token. All jobs run as the
    daemon's user. What is not given as a flag comes from the environment or the configuration file; see
    `carpool config show`.
    """
    from carpool.core.units import parse_cap
    from carpool.jobs.devices import overlap_note, parse_devices
    from carpool.jobs.host import host_supplies
    from carpool.runtime.executor.client import ExecutorOptions, ExecutorSocket
    from carpool.runtime.sharing.foreign_processes import belongs_to
    from carpool.service.config import read_settings
    from carpool.service.daemon.bootstrap import DaemonInstance, DaemonOptions
    from carpool.service.daemon.loop import LoopOptions

    settings = read_settings(os.environ, flags)
    meters = _meters()
    # Left by a daemon that was killed: its workers are no outsiders.
    left = ExecutorSocket(settings.state / "executor").resident
    is_ours = belongs_to(left) if left is not None else lambda pid: False
    found = tuple(parse_devices(settings["devices"], oversubscribe=oversubscribe, is_ours=is_ours))
    if note := overlap_note(found):
        click.echo(f"carpool: {note}", err=True)
    cap = parse_cap(settings["memory_cap"], "memory_cap")
    options = ExecutorOptions(mps=settings["lanes"] == "auto", warm=settings["warm"], memory_cap=cap)
    policy, state = settings["policy"], settings.state
    house = DaemonInstance.open(
        DaemonOptions(
            state,
            found,
            __version__,
            policy,
            default_policy(),
            options=options,
            loop=LoopOptions(commit=meters.commit),
            checkpoint_days=settings["checkpoint_days"],
            supplies=host_supplies(state),
            tell=_tell,
        )
    )
    try:
        from carpool.cli.support.serve_app import open_listeners, serve_api

        with open_listeners(settings) as ears:
            around = partial(serve_api, house, settings, meters, ears)
            asyncio.run(_serve(house, around, leave_running=leave_running))
    finally:
        house.close()
    return 0


def _meters() -> ServiceMetrics:
    """What measures the daemon; InputError where the packages that serve are not there."""
    try:
        from carpool.service.http.metrics import ServiceMetrics
    except ModuleNotFoundError as error:
        raise InputError(
            f"serving needs {error.name}, which is not installed", way_out="pip install 'carpool[serve]'"
        ) from None
    return ServiceMetrics()


async def _serve(
    house: DaemonInstance, around: Callable[[], AbstractAsyncContextManager[str]], *, leave_running: bool
) -> None:
    from carpool.service.daemon.gc_tuning import GcFreezer

    await house.start()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(name, _stop, house, leave_running)
    async with around() as address:
        for words in house.notices:
            _tell(words)
        jobs = len(house.scheduler.jobs)
        click.echo(
            f"carpool: serves {len(house.names)} device{'s' if len(house.names) != 1 else ''} from {house.options.state}"
            f" with policy {house.policy_text}; {jobs} job{'s' if jobs != 1 else ''} to go on with",
            err=True,
        )
        click.echo(f"carpool: listens at {address}", err=True)
        with GcFreezer():
            await house.run()


def _tell(words: str) -> None:
    click.echo(f"carpool: {words}", err=True)


def _stop(house: DaemonInstance, leave_running: bool) -> None:
    words = "leaves its jobs at work for the next daemon" if leave_running else "halts all jobs with checkpoints"
    _tell(words)
    house.stop(leave_running=leave_running)
