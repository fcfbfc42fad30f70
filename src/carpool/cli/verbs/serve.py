"""``carpool serve``: run the daemon, which accepts jobs over its API and resumes them after a crash."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from carpool import __version__
from carpool.cli.support.fleet import EngineChoice, engine_options, find_fleet
from carpool.cli.support.options import DEVICES_HELP, MEMORY_CAP_HELP, log_options
from carpool.cli.verbs.run import PREFERRED, default_policy
from carpool.core.errors import InputError

if TYPE_CHECKING:
    from carpool.jobs.devices import LocalDevice
    from carpool.service.config import Settings
    from carpool.service.daemon.bootstrap import DaemonInstance, DaemonOptions
    from carpool.service.http.metrics import ServiceMetrics


_EPILOG = """\b
Examples:
  carpool serve
  carpool serve --devices cuda --policy carpool --state /var/lib/carpool
  carpool serve --host 0.0.0.0 --tls-cert box.pem --tls-key box.key
  carpool serve --engine hosts --hosts lab.toml
  carpool serve --engine ray --ray-address 10.0.0.5:6379 --ray-idle 300
  carpool serve --leave-running     (SIGTERM leaves jobs running for the next daemon: an upgrade stops none)
"""


@click.command("serve", epilog=_EPILOG)
@click.option(
    "--state", metavar="DIR", help="Folder of the journal, logs and checkpoints. [default: ~/.local/state/carpool]"
)
@click.option(
    "--policy",
    metavar="NAME[:key=value]…",
    help="Scheduling policy, as listed by carpool policies. "
    f"[default: the last one used in this folder, at first {PREFERRED[0]}]",
)
@click.option(
    "--devices",
    default=None,
    metavar="SPEC",
    help=DEVICES_HELP,
)
@click.option("--oversubscribe", is_flag=True, help="Let devices of cpu:CxK share cores.")
@engine_options
@click.option(
    "--lanes",
    type=click.Choice(["auto", "slice"]),
    default=None,
    help="auto: jobs that share a GPU run concurrently where possible; slice: they take turns. [default: auto]",
)
@click.option(
    "--warm",
    type=click.IntRange(0, 8),
    default=None,
    help="Processes kept ready on each GPU while jobs wait, so that the next job skips CUDA's initialisation; 0: none. "
    "[default: 1]",
)
@click.option(
    "--memory-cap",
    default=None,
    metavar="SIZE",
    help=MEMORY_CAP_HELP,
)
@click.option("--socket", default=None, metavar="PATH", help="Path of the Unix socket. [default: api.sock in --state]")
@click.option("--host", default=None, help="Address to listen on, in addition to the socket. [default: 127.0.0.1]")
@click.option("--port", default=None, type=click.IntRange(0, 65535), help="TCP port; 0: none. [default: 7637]")
@click.option("--tls-cert", default=None, metavar="FILE", help="Certificate (PEM): the port then speaks https.")
@click.option("--tls-key", default=None, metavar="FILE", help="Key of the certificate (PEM).")
@click.option(
    "--insecure-http",
    is_flag=True,
    flag_value=True,
    default=None,
    help="Listen beyond loopback without a certificate: tokens can then be read on the network.",
)
@click.option("--leave-running", is_flag=True, help="When stopped, leave jobs running for the next daemon.")
@log_options("warning")
def serve(
    oversubscribe: bool,
    leave_running: bool,
    engine: str,
    hosts_file: str,
    ray_address: str,
    ray_idle: float,
    max_code: str,
    **flags: Any,
) -> int:
    """Run the daemon until SIGTERM, Ctrl-C or `carpool stop`.

    A request is answered once its changes are on disk. If the daemon is killed, its jobs stop at the end of a step with
    a checkpoint, and the next daemon on the same folder resumes them. If it is stopped, it checkpoints and stops all
    jobs, and the next one resumes them.

    Clients connect over the Unix socket, as the daemon's own user, or over the port with a token. All jobs run as the
    daemon's user. Settings without a flag come from the environment or the configuration file; see
    `carpool config show`.
    """
    from carpool.core.units import parse_cap
    from carpool.jobs.devices import overlap_note, parse_devices
    from carpool.logs import configure_logging
    from carpool.runtime.executor.client import ExecutorSocket
    from carpool.runtime.sharing.foreign_processes import belongs_to
    from carpool.runtime.sharing.mps_daemon import check_lanes
    from carpool.service.config import read_settings
    from carpool.service.daemon.bootstrap import DaemonInstance

    settings = read_settings(os.environ, flags)
    configure_logging(settings["log_level"], settings["log_format"])
    metrics = _metrics()
    # The workers of an executor that a killed daemon left running are not foreign processes.
    executor = ExecutorSocket(settings.state / "executor").executor_pid
    is_ours = belongs_to(executor) if executor is not None else lambda pid: False
    choice = EngineChoice(engine, hosts_file, ray_address, ray_idle, max_code)
    fleet = find_fleet(choice, settings.state, devices=flags["devices"] or "", may_be_away=True)
    devices = (
        () if fleet.members else tuple(parse_devices(settings["devices"], oversubscribe=oversubscribe, is_ours=is_ours))
    )
    check_lanes(devices, mps=settings["lanes"] == "auto", memory_cap=parse_cap(settings["memory_cap"], "memory_cap"))
    if note := overlap_note(devices):
        _echo(note)
    found = replace(_options(settings, devices, metrics), members=fleet.members, source=fleet.source)
    leaves_running = True  # unless it is stopped
    try:
        daemon = DaemonInstance.open(found)
    except BaseException:
        fleet.close()
        raise
    fleet.is_ours = True
    try:
        from carpool.cli.support.serve_app import open_listeners, serve_api

        with open_listeners(settings) as listeners:
            api = partial(serve_api, daemon, settings, metrics, listeners)
            asyncio.run(_serve(daemon, api, leave_running=leave_running))
            leaves_running = daemon.leaves_running
    finally:
        daemon.close()
        fleet.close(leave_running=leaves_running)
    return 0


def _options(settings: Settings, devices: tuple[LocalDevice, ...], metrics: ServiceMetrics) -> DaemonOptions:
    from carpool.core.units import parse_cap
    from carpool.jobs.host import host_supplies
    from carpool.logs import export_settings
    from carpool.runtime.executor.client import ExecutorOptions
    from carpool.service.daemon.bootstrap import DaemonOptions
    from carpool.service.daemon.loop import LoopOptions

    environment: dict[str, str] = {}
    export_settings(settings["log_level"], settings["log_format"], environment)
    return DaemonOptions(
        settings.state,
        devices,
        __version__,
        settings["policy"],
        default_policy(),
        options=ExecutorOptions(
            mps=settings["lanes"] == "auto",
            warm=settings["warm"],
            memory_cap=parse_cap(settings["memory_cap"], "memory_cap"),
            log_bytes=settings["log_bytes"],
            environment=environment,
            pass_env=settings["pass_env"],
        ),
        loop=LoopOptions(commit=metrics.commit),
        checkpoint_days=settings["checkpoint_days"],
        supplies=host_supplies(settings.state),
        tell=_echo,
    )


def _metrics() -> ServiceMetrics:
    try:
        from carpool.service.http.metrics import ServiceMetrics
    except ModuleNotFoundError as error:
        raise InputError(
            f"serving needs {error.name}, which is not installed", way_out="pip install 'carpool[serve]'"
        ) from None
    return ServiceMetrics()


async def _serve(
    daemon: DaemonInstance, api: Callable[[], AbstractAsyncContextManager[str]], *, leave_running: bool
) -> None:
    from carpool.service.daemon.gc_tuning import GcFreezer

    await daemon.start()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(name, _stop, daemon, leave_running)
    loop.add_signal_handler(signal.SIGUSR1, _stop, daemon, True)  # carpool stop --leave-running
    async with api() as address:
        for notice in daemon.notices:
            _echo(notice)
        devices, jobs = len(daemon.names), len(daemon.scheduler.jobs)
        _echo(
            f"serving {devices} device{'s' if devices != 1 else ''} from {daemon.options.state}"
            f" with policy {daemon.policy_text}; {jobs} job{'s' if jobs != 1 else ''} to resume"
        )
        _echo(f"listening at {address}")
        with GcFreezer():
            await daemon.run()


def _echo(words: str) -> None:
    with suppress(OSError):  # the terminal may be closed, or its disk full; the daemon continues
        click.echo(f"carpool: {words}", err=True)


def _stop(daemon: DaemonInstance, leave_running: bool) -> None:
    daemon.stop(leave_running=leave_running)
    _echo("leaving jobs running for the next daemon" if leave_running else "stopping all jobs with checkpoints")
