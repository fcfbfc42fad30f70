"""Daemon access for verbs: connection, job arguments with completion, per-job requests, JSON replies."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, TypeVar

import click

from carpool.cli.support.options import print_json, print_note

if TYPE_CHECKING:
    from carpool.service.client import Client, Json


server_option = click.option(
    "--server",
    default="",
    metavar="URL",
    help="Address of the daemon: http://HOST:PORT or unix:PATH. [default: this machine's daemon]",
)
_MAX_COMPARED = 200  # newest jobs whose names are compared with a mistyped one


def connect(server: str) -> Client:
    """Open a client of the daemon."""
    from carpool.service.client import Client

    warn_of_misspelled_variables()
    return Client(server)


def warn_of_misspelled_variables() -> None:
    """Warn of environment variables that were probably meant as settings, but are ignored."""
    from carpool.service.config import misspelled_variables

    for name, meant in misspelled_variables(os.environ):
        print_note(f"{name} is not a setting and is ignored; did you mean {meant}? All: carpool config show")


def complete_jobs(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Shell completion: names of jobs with this prefix, none if no daemon answers."""
    from carpool.core.errors import CarpoolError
    from carpool.service.client import Client

    try:
        with Client(str(ctx.params.get("server") or ""), timeout_s=1.0) as client:
            page = client.jobs(contains=incomplete, limit=50)
    except CarpoolError:
        return []
    return [job["id"] for job in page["jobs"] if job["id"].startswith(incomplete)]


job_argument = click.argument("job", shell_complete=complete_jobs)
jobs_argument = click.argument("jobs", nargs=-1, required=True, metavar="JOB…", shell_complete=complete_jobs)


def apply_to_jobs(
    jobs: Sequence[str],
    server: str,
    as_json: bool,
    request: Callable[[Client, str], Json],
    detail: Callable[[Json], str] = lambda job: "",
    *,
    array_action: str = "",
) -> int:
    """Send one request per job and print each job's new phase with `detail`; exit code 2 if any was denied.

    With `array_action`, a name that is not a job may name a sweep: the action is then applied to all its jobs.
    """
    from carpool.service.client import RequestDenied

    code, rows = 0, []
    with connect(server) as client:
        for name in jobs:
            try:
                changed = _apply_to_name(client, name, request, array_action)
            except RequestDenied as denied:
                hint = name_suggestions(client, name) if denied.status == 404 else ""
                print_note(f"{denied}{hint}")
                code = 2
                continue
            rows += changed
            if not changed:
                print_note(f"sweep {name!r} has no job left to {array_action}")
            for job in () if as_json else changed:
                click.echo(f"{job['id']} is {job['phase']}{detail(job)}")
    if as_json:
        print_json({"jobs": rows})
    return code


def name_suggestions(client: Client, job: str) -> str:
    """End of the error for an unknown job: similar names, or how to list all jobs."""
    names = [row["id"] for row in client.jobs(limit=_MAX_COMPARED)["jobs"]]
    near = get_close_matches(job, names, n=3, cutoff=0.5)
    return f". Did you mean {' or '.join(near)}?" if near else ". List all jobs with: carpool ps --all"


def _apply_to_name(client: Client, name: str, request: Callable[[Client, str], Json], array_action: str) -> list[Json]:
    from carpool.service.client import RequestDenied

    try:
        return [request(client, name)]
    except RequestDenied as denied:
        if denied.status != 404 or not array_action:
            raise
        try:
            members = set(client.apply_to_array(name, array_action))
        except RequestDenied:
            raise denied from None
        return [job for job in client.all_jobs(contains=name, newest_first=False) if job["id"] in members]


Reply = TypeVar("Reply")


def from_daemon(job: str, request: Callable[[Client, str], Reply], server: str = "") -> Reply | None:
    """Reply of the daemon about a job; without `server` None if no daemon answers or it does not know the job."""
    from carpool.core.errors import InputError
    from carpool.service.client import Client, RequestDenied, Unreachable
    from carpool.service.config import read_settings

    warn_of_misspelled_variables()
    settings = read_settings(os.environ)
    if not server and not settings["server"] and not settings.socket.is_socket():
        return None
    with Client(server, timeout_s=10.0) as client:
        try:
            return request(client, job)
        except Unreachable:
            if server:
                raise
        except RequestDenied as denied:
            if denied.status != 404:
                raise
            if server:
                raise InputError(f"{denied}{name_suggestions(client, job)}") from None
    return None
