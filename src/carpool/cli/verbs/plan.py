"""``carpool plan``: forecast where each job of a file runs and when it ends, without starting it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from carpool import __version__
from carpool.cli.support.json_output import guard_stdout

if TYPE_CHECKING:
    from carpool.core.model import JobId
    from carpool.jobs.devices import LocalDevice
    from carpool.jobs.job_file import ListedJob
    from carpool.predictors.profiles.rate_model import ProfileRateModel


_EPILOG = """\b
Examples:
  carpool plan jobs.toml
  carpool plan jobs.toml --devices cpu:4 --policy srtf --probe
  carpool plan jobs.toml --json | jq '.jobs[].end_s'
"""


@click.command("plan", epilog=_EPILOG)
@click.argument("jobs", metavar="JOBS.toml")
@click.option("--policy", metavar="NAME[:key=value]…", help="Who runs where. [default: that of run]")
@click.option("--devices", default="", metavar="SPEC", help="As for run. [default: all GPUs, else all cores]")
@click.option("--oversubscribe", is_flag=True, help="Let devices of cpu:CxK share cores.")
@click.option("--probe", is_flag=True, help="Make a few steps of every job that has no profile.")
@click.option("--seed", default=0, metavar="N", help="Of the draws behind the ranges.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON and nothing else.")
def plan(
    jobs: str, policy: str | None, devices: str, oversubscribe: bool, probe: bool, seed: int, as_json: bool
) -> int:
    """Say which job of a file would run where, with which share, and when each would start and end.

    The scheduler and the policy are those of `run`. Rates come from saved profiles (`carpool profile`, and what
    earlier runs wrote down), with --probe from a few steps made now, else from guesses; the table says which.
    Exit code 0 when every job would end, 1 when one would never be given a device, 2 for bad input.
    """
    from carpool.backends.profile_library import ProfileLibrary
    from carpool.cli.render.plan_table import print_plan
    from carpool.cli.verbs.run import default_policy
    from carpool.jobs.devices import as_cluster, overlap_note, parse_devices
    from carpool.jobs.feasibility import check_fit
    from carpool.jobs.host import host_supplies
    from carpool.jobs.job_file import read_jobs
    from carpool.policies.registry import parse_policy
    from carpool.service.queries.forecast import forecast_jobs, forecast_json

    listed = read_jobs(Path(jobs)).jobs
    found = parse_devices(devices, oversubscribe=oversubscribe)
    supplies = host_supplies(Path())
    for note in filter(None, [overlap_note(found), *check_fit(listed, as_cluster(found, supplies))]):
        click.echo(f"carpool: {note}", err=True)
    text = policy or default_policy()
    with guard_stdout():
        chosen = parse_policy(text)
    profiles = ProfileLibrary().beliefs(listed)
    if probe:
        profiles |= asyncio.run(probe_others(listed, found, profiles, quiet=as_json))
    with guard_stdout():
        forecast = forecast_jobs(listed, found, chosen, profiles, seed, supplies=supplies)
    if as_json:
        click.echo(json.dumps(forecast_json(forecast, text, found)))
    else:
        print_plan(forecast, text)
    return 0 if all(job.account.ended_at is not None for job in forecast.jobs) else 1


async def probe_others(
    jobs: Sequence[ListedJob], devices: Sequence[LocalDevice], known: dict[JobId, ProfileRateModel], *, quiet: bool
) -> dict[JobId, ProfileRateModel]:
    """A few steps of every training of which nothing is known, on the first device; InputError where one cannot run."""
    from carpool.cli.verbs.profile import progress_reporter
    from carpool.predictors.profiles.profile import profile_key
    from carpool.predictors.profiles.rate_model import ProfileRateModel
    from carpool.runtime.profiling.profiler import MeasurementBudget, make_probe

    todo = [(spec, program) for spec, program in jobs if spec.id not in known and program.entry]
    made: dict[tuple[object, ...], ProfileRateModel] = {}
    found: dict[JobId, ProfileRateModel] = {}
    with progress_reporter(quiet=quiet) as tell:
        for number, (spec, program) in enumerate(todo):
            key = (profile_key(program.entry, program.args), program.folder, program.batch_size)
            if key not in made:
                tell(number, len(todo), f"a few steps of {spec.id}")
                made[key] = ProfileRateModel.of(await make_probe(program, devices[0], MeasurementBudget(), __version__))
            found[spec.id] = made[key]
    return found
