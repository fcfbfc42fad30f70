"""Start of an agent on another machine over ssh, and certificates for agents that have none."""

from __future__ import annotations

import asyncio
import shlex
import subprocess
from pathlib import Path

from carpool.core.errors import InputError
from carpool.jobs.hosts_file import Host
from carpool.runtime.remote.remote_link import HostUnreachable, connect

_START_S = 60.0
_RETRY_S = 0.3
_STATE = ".local/state/carpool/agent"  # in the home folder there
_SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")


def start_script(host: Host) -> str:
    """The shell script that starts an agent in a session of its own; it reads the token from its standard input."""
    state = shlex.quote(host.state) if host.state else f'"$HOME"/{_STATE}'
    listen = shlex.quote(f"{'127.0.0.1' if not host.tls else '0.0.0.0'}:{host.port}")
    devices = f" --devices {shlex.quote(host.devices)}" if host.devices else ""
    return (
        f"umask 077; mkdir -p {state} && cat > {state}/token && cd {state} && "
        f"(setsid {shlex.quote(host.python)} -m carpool agent --listen {listen} --token-file token --state {state}"
        f"{devices} < /dev/null > agent.log 2>&1 &)"
    )


async def ensure_agent(host: Host) -> Host:
    """Start the agent of a host with an ssh destination if it does not answer; HostUnreachable if that fails."""
    if not host.ssh or await _is_reachable(host):
        return host
    process = await asyncio.create_subprocess_exec(
        *_SSH, host.ssh, start_script(host), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(f"{host.token}\n".encode()), _START_S)
    except TimeoutError:
        process.kill()
        output = b"no answer in time"
    where = f"host {host.name!r}: ssh {host.ssh}"
    if process.returncode:
        problem = f"the agent could not be started: {output.decode(errors='replace').strip()[-300:]}"
        raise HostUnreachable(
            problem, where=where, way_out="Try the ssh command by hand, or start carpool agent there."
        )
    for _ in range(round(_START_S / _RETRY_S)):
        if await _is_reachable(host):
            return host
        await asyncio.sleep(_RETRY_S)
    way_out = f"Read agent.log in its state folder there ({host.state or '~/' + _STATE})."
    raise HostUnreachable(f"the agent does not answer within {_START_S:g} s", where=where, way_out=way_out)


async def _is_reachable(host: Host) -> bool:
    try:
        connection = await connect(host, "facts")
    except HostUnreachable:
        return False
    connection.writer.close()
    return True


def own_certificate(state: Path, name: str) -> tuple[Path, Path]:
    """A certificate and its key in a state folder, made with openssl at the first call.

    Its issuer does not matter: the token vouches for it.
    """
    cert, key = state / "agent.pem", state / "agent.key"
    if cert.is_file() and key.is_file():
        return cert, key
    command = ["openssl", "req", "-x509", "-newkey", "rsa:3072", "-nodes", "-days", "3650", "-subj", f"/CN={name[:60]}"]
    way_out = "Install openssl, or give --tls-cert and --tls-key, or --insecure in a network you trust."
    try:
        key.touch(mode=0o600)
        made = subprocess.run(
            [*command, "-keyout", str(key), "-out", str(cert)], capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise InputError(f"no certificate can be made: {error}", way_out=way_out) from None
    if made.returncode:
        raise InputError(f"no certificate can be made: {made.stderr.strip()[-300:]}", way_out=way_out)
    return cert, key
