"""``carpool plan``: forecast where each job of a file runs and when it ends, without starting it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from carpool import __version__
from carpool.cli.support.options import guard_stdout, json_option, print_json, print_note

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
@click.option("--policy", metavar="NAME[:key=value]…", help="Scheduling policy. [default: as for run]")
@click.option(
    "--devices",
    default="",
    metavar="SPEC",
    help="Devices to plan for, as for run. [default: all free GPUs, else all cores]",
)
@click.option("--oversubscribe", is_flag=True, help="Allow cpu:CxK devices to share cores.")
@click.option("--probe", is_flag=True, help="Run a few steps of every job that has no profile.")
@click.option("--seed", default=0, metavar="N", help="Seed of the sampling behind the 80 % ranges. [default: 0]")
@json_option
def plan(
    jobs: str, policy: str | None, devices: str, oversubscribe: bool, probe: bool, seed: int, as_json: bool
) -> int:
    """Forecast where each job of a file would run, when it would start and when it would end.

    Uses the scheduler and policy of `run`, and starts nothing. Step rates come from saved profiles (of
    `carpool profile` and earlier runs), from a few steps with --probe, or from default guesses; the table says which.

    Exit code: 0 every job would end, 1 a job would never get a device, 2 bad input.
    """
    from carpool.backends.profile_library import ProfileLibrary
    from carpool.cli.render.plan_table import print_plan
    from carpool.cli.verbs.run import default_policy
    from carpool.jobs.devices import as_cluster, overlap_note, parse_devices, usable_devices
    from carpool.jobs.feasibility import check_fit
    from carpool.jobs.host import host_supplies
    from carpool.jobs.job_file import read_jobs
    from carpool.policies.registry import parse_policy
    from carpool.service.queries.forecast import forecast_jobs, forecast_json

    listed = read_jobs(Path(jobs)).jobs
    most = usable_devices(spec for spec, _ in listed)
    found = parse_devices(devices, oversubscribe=oversubscribe, most_on_cpu=most)
    supplies = host_supplies(Path())
    for note in filter(None, [overlap_note(found), *check_fit(listed, as_cluster(found, supplies))]):
        print_note(note)
    policy_text = policy or default_policy()
    with guard_stdout():
        chosen = parse_policy(policy_text)
    profiles = ProfileLibrary().beliefs(listed)
    if probe:
        profiles |= asyncio.run(probe_jobs(listed, found, profiles, quiet=as_json))
    with guard_stdout():
        forecast = forecast_jobs(listed, found, chosen, profiles, seed, supplies=supplies)
    if as_json:
        print_json(forecast_json(forecast, policy_text, found))
    else:
        print_plan(forecast, policy_text)
    return 0 if all(job.account.ended_at is not None for job in forecast.jobs) else 1


async def probe_jobs(
    jobs: Sequence[ListedJob], devices: Sequence[LocalDevice], known: dict[JobId, ProfileRateModel], *, quiet: bool
) -> dict[JobId, ProfileRateModel]:
    """Measure a few steps of every training without a profile on the first device; InputError if one cannot run."""
    from carpool.cli.verbs.profile import progress_reporter
    from carpool.predictors.profiles.profile import profile_key
    from carpool.predictors.profiles.rate_model import ProfileRateModel
    from carpool.runtime.profiling.profiler import MeasurementBudget, make_probe

    todo = [(spec, program) for spec, program in jobs if spec.id not in known and program.entry]
    probed: dict[tuple[object, ...], ProfileRateModel] = {}
    found: dict[JobId, ProfileRateModel] = {}
    with progress_reporter(quiet=quiet) as report:
        for number, (spec, program) in enumerate(todo):
            key = (profile_key(program.entry, program.args), program.folder, program.batch_size)
            if key not in probed:
                report(number, len(todo), f"probing {spec.id}")
                probed[key] = ProfileRateModel.of(
                    await make_probe(program, devices[0], MeasurementBudget(), __version__)
                )
            found[spec.id] = probed[key]
    return found
