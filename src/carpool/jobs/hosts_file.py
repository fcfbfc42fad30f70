"""Hosts file: the machines of engine ``hosts``, in TOML."""

from __future__ import annotations

import re
import stat
from dataclasses import dataclass
from pathlib import Path

from carpool.core.errors import InputError, cause
from carpool.core.units import parse_bytes
from carpool.jobs.code_archive import MAX_BYTES
from carpool.jobs.toml_table import Table, read_toml

PORT = 7638
_NAME = re.compile(r"[A-Za-z0-9][\w.\-]{0,63}", re.ASCII)
_KEYS = ("name", "address", "port", "token_file", "tls", "ssh", "python", "devices", "state")
_MIN_TOKEN = 16  # characters


@dataclass(frozen=True, slots=True)
class Host:
    """One machine and how its agent is reached."""

    name: str
    address: str
    port: int
    token: str
    tls: bool = True
    ssh: str = ""  # start the agent with ssh at this destination; empty: it was started by hand
    python: str = "python3"  # the interpreter there that has carpool installed
    devices: str = ""  # as --devices, for an agent that is started over ssh
    state: str = ""  # the agent's state folder there; empty: its default


@dataclass(frozen=True, slots=True)
class HostsFile:
    """The machines of a fleet."""

    hosts: tuple[Host, ...]
    lease_s: float = 30.0  # a machine that has not heard from its scheduler for this long suspends its jobs
    max_code_bytes: int = MAX_BYTES


def read_hosts(path: Path) -> HostsFile:
    """Read and check a hosts file; InputError names file, host and key."""
    data = read_toml(path)
    table = Table(data, str(path))
    table.only(["host", "lease", "max_code"])
    listed = data.get("host", [])
    if not isinstance(listed, list) or not listed:
        way_out = 'Add one: a line [[host]], then lines name = "box1", address = "10.0.0.5", token_file = "box1.token".'
        raise InputError("has no [[host]] table", where=str(path), way_out=way_out)
    hosts = tuple(_host(each, place, path) for place, each in enumerate(listed, start=1))
    names = [host.name for host in hosts]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"two hosts have the name {name!r}", where=str(path), way_out="Rename one of them.")
    size = parse_bytes(data["max_code"], f"{path}: max_code") if "max_code" in data else MAX_BYTES
    return HostsFile(hosts, table.number("lease", 30.0), size)


def _host(given: object, place: int, path: Path) -> Host:
    table = Table(given, f"{path}: host {place}")
    table.only(_KEYS)
    name = table.text("name")
    if not _NAME.fullmatch(name) or name == "local":
        way_out = "Use at most 64 ASCII letters, digits, '.', '_' and '-'; 'local' is this machine without a fleet."
        raise InputError(f"name is {name!r}", where=table.where, way_out=way_out)
    where = f"{path}: host {name!r}"
    table = Table(given, where)
    if not (address := table.text("address")):
        raise InputError("has no address", where=where, way_out='Add one: address = "10.0.0.5".')
    port = table.whole("port", PORT)
    if port > 65535:
        raise InputError(f"port is {port}", where=where, way_out="Write a port of at most 65535.")
    return Host(
        name,
        address,
        port,
        read_token(path.parent / (table.text("token_file") or f"{name}.token"), where),
        tls=table.flag("tls", default=True),
        ssh=table.text("ssh"),
        python=table.text("python") or "python3",
        devices=table.text("devices"),
        state=table.text("state"),
    )


def read_token(path: Path, where: str = "") -> str:
    """The token in a file that only its owner can read."""
    way_out = f"Create one: (umask 077; openssl rand -hex 32 > {path}), and copy it to both machines."
    try:
        mode = path.stat().st_mode
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"token file {path}: {cause(error)}", where=where, way_out=way_out) from None
    if stat.S_IMODE(mode) & 0o077:
        raise InputError(f"token file {path} is readable by others", where=where, way_out=f"Run: chmod 600 {path}")
    if len(token) < _MIN_TOKEN:
        problem = f"token file {path} has {len(token)} characters; at least {_MIN_TOKEN} are needed"
        raise InputError(problem, where=where, way_out=way_out)
    return token
