"""The machines of ``--engine``: options, and members that were asked for their devices."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from carpool.cli.support.options import print_note
from carpool.core.errors import InputError

if TYPE_CHECKING:
    from carpool.jobs.hosts_file import HostsFile
    from carpool.jobs.job_file import ListedJob
    from carpool.service.daemon.executor_access import FleetMember

ENGINES = ("local", "hosts", "slurm")


def engine_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--engine`` and ``--hosts`` to a command."""
    engine = click.option(
        "--engine",
        type=click.Choice(ENGINES),
        default="local",
        show_default=True,
        help="local: this machine; hosts: the machines of --hosts, each with a running carpool agent; "
        "slurm: the nodes of the Slurm allocation that this command runs in.",
    )
    hosts = click.option("--hosts", "hosts_file", default="", metavar="FILE", help="Machines of --engine hosts (TOML).")
    return engine(hosts(command))


def find_members(
    engine: str,
    hosts_file: str,
    state: Path,
    jobs: Sequence[ListedJob] = (),
    *,
    devices: str = "",
    may_be_away: bool = False,
) -> tuple[FleetMember, ...]:
    """The machines that an engine uses; none for this machine alone. InputError before anything is started.

    Every machine is asked for its devices, and whether it has the paths that the jobs name. One that may be away joins
    when it can be reached.
    """
    if engine == "local":
        if hosts_file:
            raise InputError("--hosts needs --engine hosts", way_out="Add --engine hosts, or remove --hosts.")
        return ()
    from carpool.service.daemon.remote_access import check_jobs, remote_members

    hosts = engine_hosts(engine, hosts_file, state, devices=devices)

    async def ask() -> tuple[FleetMember, ...]:
        members = await remote_members(hosts, state, may_be_away=may_be_away)
        await check_jobs(hosts, state, jobs)
        return members

    return asyncio.run(ask())


def engine_hosts(engine: str, hosts_file: str, state: Path, *, devices: str = "") -> HostsFile:
    """The machines that an engine finds or starts; those it started end with this command."""
    if engine == "slurm":
        return _slurm_hosts(hosts_file, state, devices)
    if devices:
        raise InputError(
            f"--devices {devices} is for this machine", way_out="Set devices where each carpool agent is started."
        )
    if not hosts_file:
        raise InputError(
            "--engine hosts needs --hosts FILE", way_out="Name the file of machines; see the documentation."
        )
    from carpool.jobs.hosts_file import read_hosts

    return read_hosts(Path(hosts_file))


def _slurm_hosts(hosts_file: str, state: Path, devices: str) -> HostsFile:
    from carpool.backends.engines.slurm_engine import SlurmEngine

    if hosts_file:
        raise InputError("--hosts needs --engine hosts", way_out="Remove --hosts: the allocation names the nodes.")
    engine = SlurmEngine(state, devices)
    click.get_current_context().call_on_close(engine.close)
    hosts = engine.start()
    print_note("; ".join(engine.notes))
    return hosts
