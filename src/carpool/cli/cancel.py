"""``carpool cancel``: withdraw jobs for good."""

from __future__ import annotations

import click

from carpool.cli.asking import jobs_argument, server_option, wish
from carpool.cli.flags import json_option


@click.command("cancel", epilog="Examples: carpool cancel mlp-1 mlp-2; a whole sweep by its name: carpool cancel mlp")
@jobs_argument
@server_option
@json_option
def command(jobs: tuple[str, ...], server: str, as_json: bool) -> int:
    """Withdraw jobs for good."""
    return wish(jobs, server, as_json, lambda client, job: client.cancel(job), of_array="cancel")
