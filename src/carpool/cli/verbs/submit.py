"""``carpool submit``: submit jobs to the daemon, starting one if needed, and follow them to the end."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from carpool.cli.support.daemon_client import connect, print_json, server_option
from carpool.cli.support.json_output import json_option
from carpool.core.errors import CarpoolError
from carpool.service.config import Settings
from carpool.service.transport import is_answering

if TYPE_CHECKING:
    from carpool.service.client import Client, Json


DAEMON_LOG = "daemon.log"  # in the daemon's folder: what it says
_START_TIMEOUT_S = 60.0
_START_POLL_S = 0.05


def start_daemon(settings: Settings) -> int:
    """Start `carpool serve` with the same settings and wait until it answers; its process id."""
    settings.state.mkdir(parents=True, exist_ok=True, mode=0o700)
    log = settings.state / DAEMON_LOG
    with log.open("ab") as out:
        daemon = subprocess.Popen(
            [sys.executable, "-m", "carpool", "serve", "--state", str(settings.state)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            cwd=settings.state,
            start_new_session=True,  # Ctrl-C is for this command
        )
    until = time.monotonic() + _START_TIMEOUT_S
    while not is_answering(settings.socket):
        if daemon.poll() is not None or time.monotonic() > until:
            daemon.kill()
            last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
            raise CarpoolError(f"the daemon did not start: {' '.join(last) or 'it said nothing'} (see {log})")
        time.sleep(_START_POLL_S)
    return daemon.pid


OUR_FAULT = 125  # carpool itself failed, not the job
_LOG_POLL_S = 0.3
_EPILOG = """\b
Examples:
  carpool submit jobs.toml
  carpool submit -d jobs.toml
  carpool submit jobs.toml --json | jq '.jobs[].exit_code'
"""


@click.command("submit", epilog=_EPILOG)
@click.argument("jobs", metavar="JOBS.toml", type=click.Path())
@click.option("--detach", "-d", is_flag=True, help="Print the names and leave.")
@click.option("--key", default="", metavar="TEXT", help="The same key again is the same wish: it is granted once.")
@server_option
@json_option
def submit(jobs: str, detach: bool, key: str, server: str, as_json: bool) -> int:
    """Submit the jobs of a file; they are accepted together or not at all, and can no longer be lost then.

    Without -d their logs are shown until all are over. Exit code: the job's own (several jobs: 0 when all finished,
    else 1), 2 for bad input, 125 when carpool itself failed, 130 when interrupted; the jobs go on then.
    """
    from carpool.core.errors import CarpoolError, InputError
    from carpool.service.client import Unreachable

    names: list[str] = []
    try:
        with connect(server) as client:
            names = _submitted(client, jobs, key, server)
            if detach:
                return _told(names, as_json)
            return _watched(client, names, as_json)
    except KeyboardInterrupt:
        words = f"the jobs go on; end them with: carpool cancel {' '.join(names)}"
        click.echo(f"carpool: {words if names else 'see whether the jobs were taken: carpool ps --all'}", err=True)
        raise
    except Unreachable as error:
        click.echo(f"carpool: {error}", err=True)
        return OUR_FAULT
    except InputError:
        raise
    except CarpoolError as error:
        click.echo(f"carpool: {error}", err=True)
        return OUR_FAULT


def _submitted(client: Client, jobs: str, key: str, server: str) -> list[str]:
    """Submit; where no daemon was named and none answers here, start one."""
    from carpool.service.client import Unreachable
    from carpool.service.config import read_settings

    settings = read_settings(os.environ)
    try:
        return client.submit(Path(jobs), key=key)
    except Unreachable:
        if server or settings["server"]:
            raise
    from carpool.cli.verbs.submit import start_daemon
    from carpool.jobs.job_file import read_jobs

    read_jobs(Path(jobs))  # no daemon is started for a file that it would refuse
    pid = start_daemon(settings)
    click.echo(f"carpool: started a daemon in {settings.state}; stop it with: kill {pid}", err=True)
    return client.submit(Path(jobs), key=key)


def _told(names: list[str], as_json: bool) -> int:
    if as_json:
        print_json({"jobs": [{"name": name} for name in names]})
    else:
        for name in names:
            click.echo(name)
    return 0


def _watched(client: Client, names: list[str], as_json: bool) -> int:
    """Show logs until all jobs are over; with one job they are as it printed them, with several by their names."""
    at = dict.fromkeys(names, 0)
    torn = dict.fromkeys(names, "")  # of each, the beginning of a line
    while at:
        for name in list(at):
            part = client.log(name, at[name])
            at[name] = part["next"]
            if not as_json:
                torn[name] = _show(name, torn[name] + part["text"], len(names) == 1, part["is_over"])
            if part["is_over"]:
                del at[name]
        if at:
            time.sleep(max(_LOG_POLL_S, 0.05 * len(at)))
    return _ended([client.job(name) for name in names], as_json)


def _show(name: str, text: str, is_alone: bool, is_over: bool) -> str:
    """Print what is new of a log; what is left of a line that is not whole."""
    if is_alone:
        sys.stdout.write(text)
        sys.stdout.flush()
        return ""
    *lines, rest = text.split("\n")
    for line in [*lines, rest] if is_over and rest else lines:
        click.echo(f"{name} | {line}")
    return "" if is_over else rest


def _ended(shown: list[Json], as_json: bool) -> int:
    codes = [job["exit_code"] or 0 for job in shown]
    if as_json:
        print_json({"jobs": shown})
    else:
        for job in shown:
            why = f": {job['error']}" if job["error"] else ""
            click.echo(f"carpool: {job['id']} {job['phase']}{why}", err=True)
    return codes[0] if len(codes) == 1 else int(any(codes))
