"""``carpool weight``: let jobs of the daemon count more or less."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from carpool.cli.asking import job_argument, server_option, wish
from carpool.cli.flags import json_option

if TYPE_CHECKING:
    from carpool.service.client import Json


@click.command(
    "weight",
    epilog="Example: carpool weight mlp 2.5",
    context_settings={"ignore_unknown_options": True},  # -1 is a wrong weight, not a wrong option
)
@job_argument
@click.argument("weight", type=click.FloatRange(1e-6, 1e6))
@server_option
@json_option
def command(job: str, weight: float, server: str, as_json: bool) -> int:
    """Let JOB count WEIGHT times as much as a job of weight 1 from now on."""
    return wish((job,), server, as_json, lambda client, name: client.reweigh(name, weight), _weight)


def _weight(shown: Json) -> str:
    return f" with weight {shown['weight']:g}"
