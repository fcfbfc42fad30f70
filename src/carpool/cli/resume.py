"""``carpool resume``: put paused jobs back into the queue."""

from __future__ import annotations

import click

from carpool.cli.asking import jobs_argument, server_option, wish
from carpool.cli.flags import json_option


@click.command("resume", epilog="Example: carpool resume mlp")
@jobs_argument
@server_option
@json_option
def command(jobs: tuple[str, ...], server: str, as_json: bool) -> int:
    """Put paused jobs back into the queue; they go on where they were."""
    return wish(jobs, server, as_json, lambda client, job: client.resume(job), of_array="resume")
