"""``carpool cancel``, ``pause``, ``resume``, ``weight`` and ``limit``: change jobs of the daemon."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from carpool.cli.support.daemon_client import apply_to_jobs, job_argument, jobs_argument, server_option
from carpool.cli.support.json_output import json_option

if TYPE_CHECKING:
    from carpool.service.client import Json


@click.command("cancel", epilog="Examples: carpool cancel mlp-1 mlp-2; a whole sweep by its name: carpool cancel mlp")
@jobs_argument
@server_option
@json_option
def cancel(jobs: tuple[str, ...], server: str, as_json: bool) -> int:
    """Withdraw jobs for good."""
    return apply_to_jobs(jobs, server, as_json, lambda client, job: client.cancel(job), of_array="cancel")


@click.command("pause", epilog="Example: carpool pause mlp")
@jobs_argument
@server_option
@json_option
def pause(jobs: tuple[str, ...], server: str, as_json: bool) -> int:
    """Take jobs off their devices until they are resumed; nothing is lost."""
    return apply_to_jobs(jobs, server, as_json, lambda client, job: client.pause(job), of_array="pause")


@click.command("resume", epilog="Example: carpool resume mlp")
@jobs_argument
@server_option
@json_option
def resume(jobs: tuple[str, ...], server: str, as_json: bool) -> int:
    """Put paused jobs back into the queue; they go on where they were."""
    return apply_to_jobs(jobs, server, as_json, lambda client, job: client.resume(job), of_array="resume")


@click.command(
    "weight",
    epilog="Example: carpool weight mlp 2.5",
    context_settings={"ignore_unknown_options": True},  # -1 is a wrong weight, not a wrong option
)
@job_argument
@click.argument("weight", type=click.FloatRange(1e-6, 1e6))
@server_option
@json_option
def weight(job: str, weight: float, server: str, as_json: bool) -> int:
    """Let JOB count WEIGHT times as much as a job of weight 1 from now on."""
    return apply_to_jobs((job,), server, as_json, lambda client, name: client.reweigh(name, weight), _weight)


def _weight(shown: Json) -> str:
    return f" with weight {shown['weight']:g}"


@click.command("limit", epilog="Example: carpool limit mlp 1 4")
@job_argument
@click.argument("least", type=click.IntRange(1))
@click.argument("most", type=click.IntRange(1))
@server_option
@json_option
def limit(job: str, least: int, most: int, server: str, as_json: bool) -> int:
    """Let JOB hold LEAST to MOST devices from now on."""
    if least > most:
        raise click.BadParameter(f"{most} is less than {least}, the least.", param_hint="'MOST'")
    return apply_to_jobs((job,), server, as_json, lambda client, name: client.limit(name, least, most), _range)


def _range(shown: Json) -> str:
    return f" with {shown['min_devices']} to {shown['max_devices']} devices"
