"""The machines of ``--engine``: its options, and the members with their devices."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from carpool.cli.support.options import print_note
from carpool.core.errors import InputError
from carpool.core.units import parse_bytes

if TYPE_CHECKING:
    from carpool.backends.engines.engine import Engine
    from carpool.jobs.hosts_file import HostsFile
    from carpool.jobs.job_file import ListedJob
    from carpool.service.fleet.engine_members import EngineMembers
    from carpool.service.fleet.executor_access import FleetMember

ENGINES = ("local", "hosts", "ray", "slurm")


class EngineChoice(NamedTuple):
    """The options of `engine_options`."""

    engine: str
    hosts_file: str = ""
    ray_address: str = ""
    ray_idle: float = 0.0
    max_code: str = ""

    @property
    def max_code_bytes(self) -> int:
        """The limit for the folder of a job that is sent to other machines."""
        from carpool.jobs.code_archive import MAX_BYTES

        return parse_bytes(self.max_code, "--max-code") if self.max_code else MAX_BYTES


@dataclass(slots=True)
class Fleet:
    """The machines of an engine; no members: this machine alone."""

    members: tuple[FleetMember, ...] = ()
    source: EngineMembers | None = None  # of machines that come and go
    engine: Engine | None = None  # that started their agents
    is_ours: bool = False  # this process holds the state folder, so agents that run already are its own

    def close(self, *, leave_running: bool = False) -> None:
        """End the agents, except those left for the next scheduler or perhaps used by another one."""
        if self.engine is not None:
            kept = () if self.is_ours else self.engine.left_running
            self.engine.close(keep=lambda name: leave_running or name in kept)


def engine_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--engine`` and the options of the engines to a command."""
    engine = click.option(
        "--engine",
        type=click.Choice(ENGINES),
        default="local",
        show_default=True,
        help="local: this machine; hosts: the machines of --hosts, each with a running carpool agent; "
        "ray: the nodes of a Ray cluster; slurm: the nodes of the Slurm allocation that this command runs in.",
    )
    hosts = click.option("--hosts", "hosts_file", default="", metavar="FILE", help="Machines of --engine hosts (TOML).")
    address = click.option(
        "--ray-address",
        default="",
        metavar="HOST:PORT",
        help="Cluster of --engine ray. [default: the one this machine is part of, else a local Ray is started]",
    )
    idle = click.option(
        "--ray-idle",
        type=click.FloatRange(0.0),
        default=0.0,
        metavar="SECONDS",
        help="Release a Ray node without jobs after this time, for the autoscaler to remove; 0: never. [default: 0]",
    )
    code = click.option(
        "--max-code",
        default="",
        metavar="SIZE",
        help="Limit for a job's folder that --engine ray or slurm sends to other machines. [default: 64MiB]",
    )
    return engine(hosts(address(idle(code(command)))))


def find_fleet(
    choice: EngineChoice,
    state: Path,
    jobs: Sequence[ListedJob] = (),
    *,
    devices: str = "",
    may_be_away: bool = False,
) -> Fleet:
    """The machines that an engine uses. On an InputError nothing is left running."""
    check_engine_options(choice)
    if choice.engine != "ray":
        return Fleet(find_members(choice, state, jobs, devices=devices, may_be_away=may_be_away))
    from carpool.backends.engines.ray_engine import RayEngine
    from carpool.service.fleet.engine_members import EngineMembers
    from carpool.service.fleet.remote_access import check_jobs

    engine = RayEngine(state, choice.ray_address, devices)
    source = EngineMembers(engine, state, idle_s=choice.ray_idle, max_code_bytes=choice.max_code_bytes)

    async def ask() -> tuple[FleetMember, ...]:
        hosts, members = await source.first(print_note)
        await check_jobs(hosts, state, jobs)
        return members

    try:
        return Fleet(asyncio.run(ask()), source, engine)
    except BaseException:
        engine.close(keep=lambda name: name in engine.left_running)
        raise


def check_engine_options(choice: EngineChoice) -> None:
    """InputError for options of one engine that are given for another."""
    engine = choice.engine
    if engine == "ray" and choice.hosts_file:
        raise InputError("--hosts needs --engine hosts", way_out="Remove --hosts: the Ray cluster lists its nodes.")
    if engine != "ray" and (choice.ray_address or choice.ray_idle):
        given = "--ray-address" if choice.ray_address else "--ray-idle"
        raise InputError(f"{given} needs --engine ray", way_out=f"Add --engine ray, or remove {given}.")
    if choice.max_code and engine not in ("ray", "slurm"):
        way_out = "Set max_code in the hosts file." if engine == "hosts" else "Remove it: nothing is sent."
        raise InputError("--max-code needs --engine ray or slurm", way_out=way_out)


def find_members(
    choice: EngineChoice,
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
    if choice.engine == "local":
        if choice.hosts_file:
            raise InputError("--hosts needs --engine hosts", way_out="Add --engine hosts, or remove --hosts.")
        return ()
    from carpool.service.fleet.remote_access import check_jobs, remote_members

    hosts = engine_hosts(choice, state, devices=devices)

    async def ask() -> tuple[FleetMember, ...]:
        members = await remote_members(hosts, state, may_be_away=may_be_away)
        await check_jobs(hosts, state, jobs)
        return members

    return asyncio.run(ask())


def engine_hosts(choice: EngineChoice, state: Path, *, devices: str = "") -> HostsFile:
    """The machines that an engine finds or starts; those it started end with this command."""
    if choice.engine == "slurm":
        return _slurm_hosts(choice, state, devices)
    if devices:
        raise InputError(
            f"--devices {devices} is for this machine", way_out="Set devices where each carpool agent is started."
        )
    if not choice.hosts_file:
        raise InputError(
            "--engine hosts needs --hosts FILE",
            way_out="In it, list each machine: a line [[host]], then name, address and token_file.",
        )
    from carpool.jobs.hosts_file import read_hosts

    return read_hosts(Path(choice.hosts_file))


def _slurm_hosts(choice: EngineChoice, state: Path, devices: str) -> HostsFile:
    from carpool.backends.engines.slurm_engine import SlurmEngine

    if choice.hosts_file:
        raise InputError("--hosts needs --engine hosts", way_out="Remove --hosts: the allocation names the nodes.")
    engine = SlurmEngine(state, devices, max_code_bytes=choice.max_code_bytes)
    click.get_current_context().call_on_close(engine.close)
    hosts = engine.start()
    print_note("; ".join(engine.notes))
    return hosts
