"""``carpool cancel``, ``pause``, ``resume``, ``weight`` and ``limit``: change jobs of the daemon."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from carpool.cli.support.daemon_client import apply_to_jobs, job_argument, jobs_argument, server_option
from carpool.cli.support.options import json_option

if TYPE_CHECKING:
    from carpool.service.client import Client, Json

_EPILOG = """\b
Examples:
  carpool {0} mlp-1 mlp-2
  carpool {0} mlp          (all jobs of the sweep mlp)
"""


def _phase_command(verb: str, summary: str) -> click.Command:
    @click.command(
        verb,
        help=f"{summary}\n\nJOB is the name of a job, or of a sweep for all its jobs.",
        epilog=_EPILOG.format(verb),
    )
    @jobs_argument
    @server_option
    @json_option
    def command(jobs: tuple[str, ...], server: str, as_json: bool) -> int:
        def request(client: Client, name: str) -> Any:
            return getattr(client, verb)(name)

        return apply_to_jobs(jobs, server, as_json, request, array_action=verb)

    return command


cancel = _phase_command("cancel", "Cancel jobs for good; checkpoints, logs and metrics are kept.")
pause = _phase_command(
    "pause", "Preempt jobs: they release their devices, keep their progress and wait for `carpool resume`."
)
resume = _phase_command("resume", "Put paused jobs back into the queue; they continue where they stopped.")


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
    """Set how much JOB counts in the average completion time that policies minimise.

    WEIGHT is a number from 1e-6 to 1e6; without it, 1. A job of weight 2 counts like two jobs.
    """

    def describe(job: Json) -> str:
        return f" with weight {job['weight']:g}"

    return apply_to_jobs((job,), server, as_json, lambda client, name: client.reweigh(name, weight), describe)


@click.command("limit", epilog="Example: carpool limit mlp 1 4")
@job_argument
@click.argument("min_devices", metavar="MIN", type=click.IntRange(1))
@click.argument("max_devices", metavar="MAX", type=click.IntRange(1))
@server_option
@json_option
def limit(job: str, min_devices: int, max_devices: int, server: str, as_json: bool) -> int:
    """Set how many devices JOB may use: at least MIN, at most MAX. A running training is resized without a restart."""
    if min_devices > max_devices:
        raise click.BadParameter(f"{max_devices} is less than MIN ({min_devices}).", param_hint="'MAX'")

    def request(client: Client, name: str) -> Json:
        return client.limit(name, min_devices, max_devices)

    def describe(job: Json) -> str:
        return f" with {job['min_devices']} to {job['max_devices']} devices"

    return apply_to_jobs((job,), server, as_json, request, describe)
