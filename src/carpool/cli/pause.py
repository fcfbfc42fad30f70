"""``carpool pause``: take jobs off their devices until they are resumed."""

from __future__ import annotations

import click

from carpool.cli.asking import jobs_argument, server_option, wish
from carpool.cli.flags import json_option


@click.command("pause", epilog="Example: carpool pause mlp")
@jobs_argument
@server_option
@json_option
def command(jobs: tuple[str, ...], server: str, as_json: bool) -> int:
    """Take jobs off their devices until they are resumed; nothing is lost."""
    return wish(jobs, server, as_json, lambda client, job: client.pause(job), of_array="pause")
