"""``carpool cancel``, ``pause``, ``resume``, ``weight`` and ``limit``: change jobs of the daemon."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from carpool.cli.support.daemon_client import apply_to_jobs, job_argument, jobs_argument, server_option
from carpool.cli.support.json_output import json_option

if TYPE_CHECKING:
    from carpool.service.client import Client, Json


_CANCEL_EPILOG = """\b
Examples:
  carpool cancel mlp-1 mlp-2
  carpool cancel mlp          (all jobs of the sweep mlp)
"""


@click.command("cancel", epilog=_CANCEL_EPILOG)
@jobs_argument
@server_option
@json_option
def cancel(jobs: tuple[str, ...], server: str, as_json: bool) -> int:
    """Cancel jobs for good; checkpoints, logs and metrics are kept.

    JOB is the name of a job, or of a sweep for all its jobs.
    """
    return apply_to_jobs(jobs, server, as_json, lambda client, job: client.cancel(job), array_action="cancel")


@click.command("pause", epilog="Example: carpool pause mlp")
@jobs_argument
@server_option
@json_option
def pause(jobs: tuple[str, ...], server: str, as_json: bool) -> int:
    """Preempt jobs: they checkpoint, release their devices and wait for `carpool resume`.

    JOB is the name of a job, or of a sweep for all its jobs.
    """
    return apply_to_jobs(jobs, server, as_json, lambda client, job: client.pause(job), array_action="pause")


@click.command("resume", epilog="Example: carpool resume mlp")
@jobs_argument
@server_option
@json_option
def resume(jobs: tuple[str, ...], server: str, as_json: bool) -> int:
    """Put paused jobs back into the queue; they continue from their checkpoints.

    JOB is the name of a job, or of a sweep for all its jobs.
    """
    return apply_to_jobs(jobs, server, as_json, lambda client, job: client.resume(job), array_action="resume")


@click.command(
    "weight",
    epilog="Example: carpool weight mlp 2.5",
    context_settings={"ignore_unknown_options": True},  # report -1 as a wrong weight, not as a wrong option
)
@job_argument
@click.argument("weight", type=click.FloatRange(1e-6, 1e6))
@server_option
@json_option
def weight(job: str, weight: float, server: str, as_json: bool) -> int:
    """Set the weight of JOB: policies count it WEIGHT times as much as a job of weight 1.

    WEIGHT is a number from 1e-6 to 1e6.
    """
    return apply_to_jobs((job,), server, as_json, lambda client, name: client.reweigh(name, weight), _weight)


def _weight(job: Json) -> str:
    return f" with weight {job['weight']:g}"


@click.command("limit", epilog="Example: carpool limit mlp 1 4")
@job_argument
@click.argument("min_devices", metavar="MIN", type=click.IntRange(1))
@click.argument("max_devices", metavar="MAX", type=click.IntRange(1))
@server_option
@json_option
def limit(job: str, min_devices: int, max_devices: int, server: str, as_json: bool) -> int:
    """Set how many devices JOB may use: at least MIN, at most MAX. A running job is resized without a restart."""
    if min_devices > max_devices:
        raise click.BadParameter(f"{max_devices} is less than MIN ({min_devices}).", param_hint="'MAX'")

    def request(client: Client, name: str) -> Json:
        return client.limit(name, min_devices, max_devices)

    return apply_to_jobs((job,), server, as_json, request, _device_range)


def _device_range(job: Json) -> str:
    return f" with {job['min_devices']} to {job['max_devices']} devices"
