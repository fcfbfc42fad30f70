"""``carpool submit``: submit jobs to the daemon, starting one if needed, and follow them to the end."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from carpool.cli.support.command_line import ProgramCommand, given_program, job_options
from carpool.cli.support.daemon_client import connect, server_option
from carpool.cli.support.options import json_option, print_json, print_note, sweep_option

if TYPE_CHECKING:
    from carpool.service.client import Client, Json
    from carpool.service.config import Settings

DAEMON_LOG = "daemon.log"  # stdout and stderr of a daemon started by `submit`, in its state folder
_START_TIMEOUT_S = 60.0
_START_POLL_S = 0.05
CARPOOL_FAILED = 125  # exit code: carpool itself failed, not the job
LOG_POLL_S = 0.3
_PAUSE_S = 0.05  # between requests for one log: the daemon allows one user 50 requests per second
_MORE_BYTES = 1 << 17  # a piece of a log of at least this length: more output is available
_LONGEST_LINE = 1 << 20  # characters; longer ones are printed in parts
_EPILOG = """\b
Examples:
  carpool submit -- python train.py --lr 0.1
  carpool submit jobs.toml
  carpool submit --name wide --devices 2 --set priority=high -- torchrun --nproc-per-node 2 train.py
  carpool submit -d --sweep lr=0.1,0.01 -- python train.py --lr {lr}
  carpool submit jobs.toml --json | jq '.jobs[].exit_code'
"""


@click.command("submit", cls=ProgramCommand, epilog=_EPILOG)
@click.argument("jobs", metavar="[JOBS.toml]", required=False, type=click.Path())
@job_options
@click.option(
    "--devices", default=None, metavar="N", type=click.IntRange(1), help="Devices of the program. [default: 1]"
)
@click.option("--detach", "-d", is_flag=True, help="Print the names of the jobs and exit.")
@click.option("--key", default="", metavar="TEXT", help="Idempotency key: accept submissions with this key only once.")
@sweep_option
@server_option
@json_option
def submit(
    jobs: str | None,
    name: str,
    resumable: bool,
    env: tuple[str, ...],
    settings: tuple[str, ...],
    devices: int | None,
    detach: bool,
    key: str,
    sweep: tuple[str, ...],
    server: str,
    as_json: bool,
) -> int:
    """Submit a program, or the jobs of a file, to the daemon and print their output until all have ended.

    The program runs in the current folder. Options of carpool come before --, the program and its own options after it.

    Starts a daemon if none runs on this machine. The jobs are accepted all or none; once accepted they are on disk and
    survive a crash of the daemon.

    Exit code: that of the job (several jobs: 0 all finished, 1 otherwise), 2 bad input, 125 carpool itself failed,
    130 interrupted (the jobs continue).
    """
    from carpool.core.errors import CarpoolError, InputError
    from carpool.service.client import Unreachable

    program = given_program(name, resumable, env, settings, jobs)
    if devices and program is None:
        raise InputError("--devices needs a program", way_out="Write it last: -- python train.py.")
    if devices and program is not None:
        program["job"][0]["devices"] = devices
    if program is None and jobs is None:
        raise InputError(
            "nothing is given to submit",
            way_out="Name a job file: carpool submit jobs.toml; or a program: carpool submit -- python train.py.",
        )
    names: list[str] = []
    try:
        with connect(server) as client:
            names = _submit(client, program or Path(jobs or ""), key, server, sweep)
            return _print_names(names, as_json) if detach else follow(client, names, as_json)
    except KeyboardInterrupt:
        hint = f"the jobs continue; cancel them with: carpool cancel {' '.join(names)}"
        print_note(hint if names else "check whether the jobs were accepted: carpool ps --all")
        raise
    except CarpoolError as error:
        if isinstance(error, InputError) and not isinstance(error, Unreachable):
            raise
        print_note(error)
        return CARPOOL_FAILED


def _submit(client: Client, jobs: Path | Mapping[str, Any], key: str, server: str, sweep: tuple[str, ...]) -> list[str]:
    """Submit, starting a daemon if no server is set and none answers on this machine."""
    from carpool.core.errors import InputError
    from carpool.jobs.sweep import add_sweep, parse_sweep_options
    from carpool.service.client import Unreachable, submission_body
    from carpool.service.config import misspelled_variables, read_settings, variable

    settings, params = read_settings(os.environ), parse_sweep_options(sweep)
    folder = jobs.parent if isinstance(jobs, Path) else Path.cwd()
    tables = add_sweep(submission_body(jobs) if isinstance(jobs, Path) else jobs, params, "--sweep") if params else jobs
    try:
        return client.submit(tables, folder=folder, key=key)
    except Unreachable:
        if server or settings["server"]:
            raise
    for name, meant in misspelled_variables(os.environ):
        if meant == variable("server"):
            raise InputError(
                f"{name} is not a setting", way_out=f"Set {meant} to the daemon's address, or unset {name}."
            )
    from carpool.jobs.job_file import parse_jobs, read_jobs

    # Start no daemon for invalid jobs.
    if isinstance(jobs, Path):
        read_jobs(jobs, params)
    else:
        parse_jobs(add_sweep(jobs, params, "--sweep"), folder, "command line")
    pid = start_daemon(settings)
    print_note(f"started a daemon in {settings.state} (process {pid}); stop it with: carpool stop")
    return client.submit(tables, folder=folder, key=key)


def start_daemon(settings: Settings) -> int:
    """Start `carpool serve` with the same settings, wait until it answers, and return its process id."""
    import subprocess  # slow to import, and seldom needed

    from carpool.core.errors import CarpoolError
    from carpool.service.transport import is_answering

    settings.state.mkdir(parents=True, exist_ok=True, mode=0o700)
    log = settings.state / DAEMON_LOG
    with log.open("ab") as out:
        daemon = subprocess.Popen(
            [sys.executable, "-m", "carpool", "serve", "--state", str(settings.state)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            cwd=settings.state,
            start_new_session=True,  # Ctrl-C must not reach the daemon
        )
    deadline = time.monotonic() + _START_TIMEOUT_S
    while not is_answering(settings.socket):
        if daemon.poll() is not None or time.monotonic() > deadline:
            daemon.kill()
            last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
            raise CarpoolError(f"the daemon did not start: {' '.join(last) or 'no output'} (see {log})")
        time.sleep(_START_POLL_S)
    return daemon.pid


def _print_names(names: list[str], as_json: bool) -> int:
    if as_json:
        print_json({"jobs": [{"name": name} for name in names]})
    else:
        for name in names:
            click.echo(name)
    return 0


def follow(client: Client, names: Sequence[str], as_json: bool) -> int:
    """Print the logs until all jobs have ended; lines are prefixed with the job's name if there are several jobs."""
    offsets = dict.fromkeys(names, 0)
    partial_lines = dict.fromkeys(names, "")
    while offsets:
        most = 0
        for name in list(offsets):
            chunk = client.log(name, offsets[name])
            offsets[name] = chunk["next"]
            most = max(most, chunk["next"] - chunk["start"])
            if not as_json:
                text = partial_lines[name] + chunk["text"]
                partial_lines[name] = _print_log(name, text, len(names) == 1, chunk["is_over"])
            if chunk["is_over"]:
                del offsets[name]
        if offsets:
            time.sleep(max(LOG_POLL_S if most < _MORE_BYTES else 0.0, _PAUSE_S * len(offsets)))
    return _print_end([client.job(name) for name in names], as_json)


def _print_log(name: str, text: str, is_only_job: bool, is_over: bool) -> str:
    """Print the complete lines of a piece of a log and return the rest."""
    if is_only_job:
        sys.stdout.write(text)
        sys.stdout.flush()
        return ""
    *lines, rest = text.split("\n")
    if len(rest) > _LONGEST_LINE:
        lines, rest = [*lines, rest], ""
    for line in [*lines, rest] if is_over and rest else lines:
        click.echo(f"{name} | {line}")
    return "" if is_over else rest


def _print_end(jobs: list[Json], as_json: bool) -> int:
    codes = [job["exit_code"] or 0 for job in jobs]
    if as_json:
        print_json({"jobs": jobs})
    else:
        for job in jobs:
            print_note(f"{job['id']} {job['phase']}" + (f": {job['error']}" if job["error"] else ""))
    return codes[0] if len(codes) == 1 else int(any(codes))
