"""``carpool logs``: what a job has printed, and what it goes on to print."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from carpool.cli.asking import connect, job_argument, near_names, print_json, server_option
from carpool.cli.flags import json_option

if TYPE_CHECKING:
    from carpool.service.client import Client

_EPILOG = """\b
Examples:
  carpool logs mlp
  carpool logs -f mlp
"""


@click.command("logs", epilog=_EPILOG)
@job_argument
@click.option("--follow", "-f", is_flag=True, help="Go on until the job is over.")
@click.option("--tail", default=0, metavar="BYTES", type=click.IntRange(0), help="Only so much of its end.")
@server_option
@json_option
def command(job: str, follow: bool, tail: int, server: str, as_json: bool) -> None:
    """Print JOB's log."""
    from carpool.core.errors import InputError
    from carpool.service.client import Denied

    with connect(server) as client:
        try:
            _print(client, job, -tail if tail else 0, follow, as_json)
        except Denied as denied:
            if denied.status != 404:
                raise
            raise InputError(f"{denied}{near_names(client, job)}") from None


def _print(client: Client, job: str, start: int, follow: bool, as_json: bool) -> None:
    if as_json:
        print_json({"job": job, **client.log(job, start)})
        return
    if follow:
        for piece in client.follow(job, start):
            sys.stdout.buffer.write(piece)
            sys.stdout.flush()
        return
    while True:
        part = client.log(job, start)
        click.echo(part["text"], nl=False)
        if part["next"] == part["start"]:
            return
        start = part["next"]
