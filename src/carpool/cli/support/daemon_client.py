"""Daemon access for verbs: connection, job arguments with completion, per-job requests, JSON replies."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from carpool.service.client import Client, Json


server_option = click.option(
    "--server", default="", metavar="URL", help="The daemon: http://HOST:PORT or unix:PATH. [default: the one here]"
)
_NEAR_AMONG = 200  # of the newest jobs a mistyped name is compared with


def connect(server: str) -> Client:
    """A line to the daemon."""
    from carpool.service.client import Client

    return Client(server)


def complete_jobs(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Names of jobs that begin so, for the shell; nothing where no daemon answers."""
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
    ask: Callable[[Client, str], Json],
    more: Callable[[Json], str] = lambda shown: "",
    *,
    of_array: str = "",
) -> int:
    """Ask the same of several jobs; all are tried, and the first refusal decides the exit code.

    What is granted is told with the job's phase and with what `more` says of the job. With `of_array`, the wish's word,
    a name that is no job's may be a sweep's: then it is asked of all its jobs.
    """
    from carpool.service.client import RequestDenied

    code, rows = 0, []
    with connect(server) as client:
        for name in jobs:
            try:
                shown = _apply_to_name(client, name, ask, of_array)
            except RequestDenied as denied:
                click.echo(
                    f"carpool: {denied}{name_suggestions(client, name) if denied.status == 404 else ''}", err=True
                )
                code = code or 2
                continue
            rows += shown
            for job in () if as_json else shown:
                click.echo(f"{job['id']} is {job['phase']}{more(job)}")
    if as_json:
        print_json({"jobs": rows})
    return code


def name_suggestions(client: Client, job: str) -> str:
    """What somebody may have meant who named a job that is not there; nothing where no name comes near."""
    near = get_close_matches(job, [row["id"] for row in client.jobs(limit=_NEAR_AMONG)["jobs"]], n=3, cutoff=0.5)
    return f". Did you mean {' or '.join(near)}?" if near else ". All there are: carpool ps --all"


def _apply_to_name(client: Client, name: str, ask: Callable[[Client, str], Json], of_array: str) -> list[Json]:
    """The jobs that a name stands for, after the wish."""
    from carpool.service.client import RequestDenied

    try:
        return [ask(client, name)]
    except RequestDenied as denied:
        if denied.status != 404 or not of_array:
            raise
        try:
            members = set(client.wish_array(name, of_array))
        except RequestDenied:
            raise denied from None
        return [job for job in client.all_jobs(contains=name, newest_first=False) if job["id"] in members]


def print_json(value: dict[str, Any]) -> None:
    """A document on stdout."""
    click.echo(json.dumps({"schema": 1, **value}))


Found = TypeVar("Found")


def from_daemon(job: str, ask: Callable[[Client, str], Found]) -> Found | None:
    """What the daemon says of a job; None where no daemon answers, or it has no such job."""
    from carpool.service.client import Client, RequestDenied, Unreachable
    from carpool.service.config import read_settings

    settings = read_settings(os.environ)
    if not settings["server"] and not settings.socket.is_socket():
        return None
    try:
        with Client(timeout_s=10.0) as client:
            return ask(client, job)
    except Unreachable:
        return None
    except RequestDenied as denied:
        if denied.status == 404:
            return None
        raise
