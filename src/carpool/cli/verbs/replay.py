"""``carpool replay``: simulate a recorded run from its profiles and compare job by job."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from carpool import __version__
from carpool.cli.support.json_output import guard_stdout, json_option

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
    help="learned: what is known after the run; before: what was known when it began.",
)
@click.option("--policy", default="", metavar="NAME[:key=value]…", help="Another than that of the run: what if?")
@json_option
def replay(run: str, profiles: str, policy: str, as_json: bool) -> int:
    """Simulate RUN, by name or folder, from the profiles of its jobs, and compare with what really happened.

    From the recording come arrivals and how many steps each job made; how fast they are, alone and beside each other,
    and what starts, moves and ends cost, comes from the profiles. The policy decides anew. Exit code 0 when every job
    ends, 1 when one never does, 2 for bad input.
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
        found = simulate_run(folder, parse_policy(text), truth, believed)
    if as_json:
        click.echo(json.dumps(as_document(found, run, text, profiles)))
    else:
        print_replay(found)
    return 0 if found.simulated_s is not None else 1


def as_document(found: ReplayResult, run: str, policy: str, profiles: str) -> dict[str, object]:
    """What ``replay --json`` prints."""
    return {
        "schema": 1,
        "version": __version__,
        "run": run,
        "policy": policy,
        "profiles": profiles,
        "makespan_s": {"live": found.recorded_s, "simulated": found.simulated_s, "error": found.error},
        "worst_error": found.worst,
        "jobs": [
            {
                "name": job.spec.id,
                "weight": job.spec.weight,
                "submit_s": job.submitted_at,
                "live_end_s": job.recorded_at,
                "simulated_end_s": job.simulated_at,
                "error": job.error,
            }
            for job in found.jobs
        ],
    }


def print_replay(found: ReplayResult, tell: Callable[[str], None] = click.echo) -> None:
    """One line for every job, and one for the whole."""
    wide = max(len("makespan"), *(len(job.spec.id) for job in found.jobs))
    tell(f"{'job':{wide}}  submitted   live end  simulated   error")
    for job in found.jobs:
        tell(_line(job.spec.id, wide, f"{job.submitted_at:9.2f}", job.recorded_at, job.simulated_at, job.error))
    tell(_line("makespan", wide, "", found.recorded_s, found.simulated_s, found.error))


def _line(name: str, wide: int, since: str, lived: float, simulated: float | None, error: float | None) -> str:
    again, off = ("never", "–") if simulated is None or error is None else (f"{simulated:.2f}", f"{error:+.1%}")
    return f"{name:{wide}}  {since:>9}  {lived:9.2f}  {again:>9}  {off:>6}"
