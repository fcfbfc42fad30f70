"""``carpool agent``: serve a scheduler on another machine; ``carpool slurm``: run jobs in Slurm allocations."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import shutil
import ssl
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from carpool.cli.support.options import DEVICES_HELP, log_options, print_note
from carpool.core.errors import InputError, cause

if TYPE_CHECKING:
    from carpool.runtime.remote.remote_agent import AgentOptions

_AGENT_EPILOG = """\b
Examples:
  carpool agent --listen 127.0.0.1:7638 --token-file box1.token
  carpool agent --listen 10.0.0.5:7638 --token-file box1.token --devices cuda

\b
A token: (umask 077; openssl rand -hex 32 > box1.token)
"""


@click.command("agent", epilog=_AGENT_EPILOG)
@click.option(
    "--listen",
    required=True,
    metavar="ADDRESS:PORT",
    help="Address and port that the scheduler connects to; port 0: any free one.",
)
@click.option("--token-file", required=True, metavar="FILE", help="The secret that scheduler and agent share.")
@click.option(
    "--devices",
    default="",
    metavar="SPEC",
    help=DEVICES_HELP,
)
@click.option("--oversubscribe", is_flag=True, help="Let devices of cpu:CxK share cores.")
@click.option(
    "--state", default="", metavar="DIR", help="Folder of jobs and code. [default: ~/.local/state/carpool/agent]"
)
@click.option("--tls-cert", default="", metavar="FILE", help="Certificate (PEM). [default: a new one, kept in --state]")
@click.option("--tls-key", default="", metavar="FILE", help="Key of the certificate (PEM).")
@click.option("--publish", default="", metavar="FILE", help="Write address and port to this file once it listens.")
@click.option("--insecure", is_flag=True, help="Listen beyond loopback without encryption.")
@log_options("warning")
def agent(
    listen: str,
    token_file: str,
    devices: str,
    oversubscribe: bool,
    state: str,
    tls_cert: str,
    tls_key: str,
    publish: str,
    insecure: bool,
    log_level: str | None,
    log_format: str | None,
) -> None:
    """Let a scheduler on another machine run jobs on this machine's devices.

    The scheduler names this machine in the file of --hosts (carpool run or serve, --engine hosts). SIGTERM stops all
    jobs with checkpoints.
    """
    from carpool.logs import configure_logging
    from carpool.runtime.remote.remote_agent import serve_agent
    from carpool.runtime.remote.remote_start import own_certificate
    from carpool.service.transport import is_loopback, listen_tcp

    configure_logging(log_level or "warning", log_format or "")
    host, port = parse_address(listen)
    folder = _state_folder(state)
    if not tls_cert and not tls_key and not insecure and not is_loopback(host):
        tls_cert, tls_key = map(str, own_certificate(folder, platform.node()))
    context = _context(tls_cert, tls_key)
    options = _options(token_file, devices, folder, tls_cert, oversubscribe=oversubscribe)
    with listen_tcp(host, port) as listener:
        names, bound = ", ".join(device.name for device in options.devices), listener.getsockname()[1]
        print_note(f"listening on {host}:{bound} with {names}; state in {options.state}")
        if publish:
            _publish(Path(publish), host, bound)
        asyncio.run(serve_agent(listener, options, context))


def _publish(path: Path, host: str, port: int) -> None:
    """Write where the agent listens, whole or not at all."""
    draft = path.with_name(f".{path.name}.part")
    draft.write_text(json.dumps({"schema": 1, "address": host, "port": port}), encoding="ascii")
    draft.replace(path)


def parse_address(text: str) -> tuple[str, int]:
    """``HOST:PORT`` or ``[IPV6]:PORT``."""
    host, separator, port = text.rpartition(":")
    if not separator or not port.isdecimal() or int(port) > 65535 or not host.strip("[]"):
        raise InputError(f"--listen {text!r}", way_out="Write ADDRESS:PORT, such as 10.0.0.5:7638.")
    return host.strip("[]"), int(port)


def _context(cert: str, key: str) -> ssl.SSLContext | None:
    if not cert and not key:
        return None
    if not cert or not key:
        raise InputError(f"--tls-{'key' if cert else 'cert'} is missing", way_out="Give both, as PEM files.")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(cert, key)
    except OSError as error:
        way_out = "Use a certificate and its matching key, both PEM files."
        raise InputError(f"cannot load: {error}", where=f"{cert}, {key}", way_out=way_out) from None
    return context


def _state_folder(state: str) -> Path:
    from carpool.service.config import read_settings

    folder = (Path(state) if state else read_settings(os.environ).state / "agent").absolute()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"cannot be made: {cause(error)}", where=str(folder), way_out="Name another --state."
        ) from None
    return folder


def _options(token_file: str, devices: str, folder: Path, cert: str, *, oversubscribe: bool) -> AgentOptions:
    from carpool.jobs.devices import parse_devices
    from carpool.jobs.environment import daemon_environment
    from carpool.jobs.host import host_supplies
    from carpool.jobs.hosts_file import read_token
    from carpool.runtime.remote.remote_agent import AgentOptions, certificate_of
    from carpool.runtime.remote.remote_link import describe_drivers
    from carpool.service.config import read_settings

    return AgentOptions(
        folder,
        parse_devices(devices, oversubscribe=oversubscribe),
        host_supplies(folder),
        read_token(Path(token_file)),
        describe_drivers(),
        certificate_of(Path(cert)) if cert else b"",
        daemon_environment(os.environ, read_settings(os.environ)["pass_env"]),
    )


_SLURM_EPILOG = """\b
Examples:
  carpool slurm jobs.toml --time 4:00:00 --sbatch=--gpus-per-node=4
  carpool slurm jobs.toml --time 4:00:00 --nodes 4 --sbatch=--gpus-per-node=8
  carpool slurm jobs.toml --time 30 --sbatch=--partition=short --no-submit
"""


@click.command("slurm", epilog=_SLURM_EPILOG)
@click.argument("jobs", metavar="JOBS.toml")
@click.option(
    "--time",
    "limit",
    required=True,
    metavar="TIME",
    help="Time limit of one allocation: minutes, H:M:S or D-H, as for sbatch.",
)
@click.option("--nodes", default=1, show_default=True, type=click.IntRange(1), help="Nodes of one allocation.")
@click.option(
    "--stop-before",
    default=120,
    show_default=True,
    type=click.IntRange(1, 65535),
    metavar="SECONDS",
    help="Stop with checkpoints this long before the limit.",
)
@click.option(
    "--state", default="", metavar="DIR", help="State folder, on a shared disk. [default: .carpool/slurm/NAME]"
)
@click.option("--sbatch", "options", multiple=True, metavar="OPTION", help="Further option of sbatch. Repeatable.")
@click.option("--run", "arguments", multiple=True, metavar="ARG", help="Further argument of carpool run. Repeatable.")
@click.option("--no-submit", is_flag=True, help="Only write the script.")
def slurm(
    jobs: str,
    limit: str,
    nodes: int,
    stop_before: int,
    state: str,
    options: tuple[str, ...],
    arguments: tuple[str, ...],
    no_submit: bool,
) -> None:
    """Run a job file on nodes of a Slurm cluster, in as many allocations as it takes.

    Writes the batch script NAME.slurm beside the job file and submits it. Before the time limit all jobs stop with
    checkpoints, the batch job is requeued, and the next allocation resumes them.
    """
    from carpool.backends.engines.slurm_engine import run_slurm
    from carpool.jobs.job_file import read_jobs
    from carpool.jobs.slurm_script import SlurmJob, batch_script

    file = Path(jobs).absolute()
    read_jobs(file)
    folder = Path(state).absolute() if state else file.parent / ".carpool" / "slurm" / file.stem
    job = SlurmJob(file, folder, sys.executable, limit, nodes, stop_before, options, arguments)
    script = file.with_suffix(".slurm")
    script.write_text(batch_script(job), encoding="utf-8")
    click.echo(script)
    if not no_submit:
        if shutil.which("sbatch") is None:
            way_out = "Run it on a login node of the cluster, or write the script only: --no-submit."
            raise InputError("sbatch is not installed here", way_out=way_out)
        click.echo(run_slurm("sbatch", str(script), environment=os.environ).strip())
