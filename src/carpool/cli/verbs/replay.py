"""``carpool replay``: simulate a recorded run from its profiles and compare job by job."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from carpool import __version__
from carpool.cli.support.options import guard_stdout, json_option, print_json

if TYPE_CHECKING:
    from carpool.cli.support.replay_sim import ReplayResult


_EPILOG = """\b
Examples:
  carpool replay jobs
  carpool replay .carpool/runs/jobs-2 --profiles before
  carpool replay jobs --policy srtf --json | jq .makespan_s.simulated
"""


@click.command("replay", epilog=_EPILOG)
@click.argument("run", metavar="RUN")
@click.option(
    "--profiles",
    type=click.Choice(["learned", "before"]),
    default="learned",
    show_default=True,
    help="Profiles to simulate with: those after the run (learned), or those it started with (before).",
)
@click.option("--policy", default="", metavar="NAME[:key=value]…", help="Use this policy instead of the run's.")
@json_option
def replay(run: str, profiles: str, policy: str, as_json: bool) -> int:
    """Simulate a recorded run from the profiles of its jobs and compare end times (in seconds) job by job.

    RUN is the name or folder of a run. Submission times and step counts are taken from the recording; step rates,
    interference between jobs, and start, resize and end overheads from the profiles. The policy makes all decisions
    again.

    Exit code: 0 every job ends, 1 a job never ends, 2 bad input.
    """
    from carpool.backends.run_folder import BELIEVED, PROFILE
    from carpool.cli.support.replay_sim import kept_profiles, simulate_run
    from carpool.cli.support.run_lookup import named_run
    from carpool.policies.registry import parse_policy

    folder = named_run(run)
    text = policy or folder.settings().policy
    believed = kept_profiles(folder, BELIEVED)
    truth = kept_profiles(folder, PROFILE) if profiles == "learned" else believed
    with guard_stdout():
        result = simulate_run(folder, parse_policy(text), truth, believed)
    if as_json:
        print_json(as_document(result, run, text, profiles))
    else:
        print_replay(result)
    return 0 if result.simulated_s is not None else 1


def as_document(result: ReplayResult, run: str, policy: str, profiles: str) -> dict[str, object]:
    """Document printed by ``replay --json``."""
    return {
        "version": __version__,
        "run": run,
        "policy": policy,
        "profiles": profiles,
        "makespan_s": {"live": result.recorded_s, "simulated": result.simulated_s, "error": result.error},
        "worst_error": result.worst,
        "jobs": [
            {
                "name": job.spec.id,
                "weight": job.spec.weight,
                "submit_s": job.submitted_at,
                "live_end_s": job.recorded_at,
                "simulated_end_s": job.simulated_at,
                "error": job.error,
            }
            for job in result.jobs
        ],
    }


def print_replay(result: ReplayResult, write: Callable[[str], None] = click.echo) -> None:
    """Print one line per job and one for the makespan."""
    width = max(len("makespan"), *(len(job.spec.id) for job in result.jobs))
    write(f"{'job':{width}}  submitted   live end  simulated   error")
    for job in result.jobs:
        write(_line(job.spec.id, width, f"{job.submitted_at:9.2f}", job.recorded_at, job.simulated_at, job.error))
    write(_line("makespan", width, "", result.recorded_s, result.simulated_s, result.error))


def _line(name: str, width: int, submitted: str, live: float, simulated: float | None, error: float | None) -> str:
    end, deviation = ("never", "–") if simulated is None or error is None else (f"{simulated:.2f}", f"{error:+.1%}")
    return f"{name:{width}}  {submitted:>9}  {live:9.2f}  {end:>9}  {deviation:>6}"
