"""``carpool limit``: how many devices a job of the daemon may hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from carpool.cli.asking import job_argument, server_option, wish
from carpool.cli.flags import json_option

if TYPE_CHECKING:
    from carpool.service.client import Json


@click.command("limit", epilog="Example: carpool limit mlp 1 4")
@job_argument
@click.argument("least", type=click.IntRange(1))
@click.argument("most", type=click.IntRange(1))
@server_option
@json_option
def command(job: str, least: int, most: int, server: str, as_json: bool) -> int:
    """Let JOB hold LEAST to MOST devices from now on."""
    if least > most:
        raise click.BadParameter(f"{most} is less than {least}, the least.", param_hint="'MOST'")
    return wish((job,), server, as_json, lambda client, name: client.limit(name, least, most), _range)


def _range(shown: Json) -> str:
    return f" with {shown['min_devices']} to {shown['max_devices']} devices"
