"""``carpool demo``: compare four trainings run one after another and shared."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import click

_EPILOG = """\b
Examples:
  carpool demo
  carpool demo --devices cpu:4 --out shown
  carpool demo --simulated --jobs 2000
"""


@click.command("demo", epilog=_EPILOG)
@click.option(
    "--out", default="out", show_default=True, metavar="DIR", help="Directory for timelines, report page and runs."
)
@click.option(
    "--devices",
    default="",
    metavar="SPEC",
    help="Devices to use, such as cpu:4 or cuda. [default: all GPUs, else all cores]",
)
@click.option("--quick", is_flag=True, help="Train for fewer epochs: shows that it works, not the speed-up.")
@click.option(
    "--simulated", is_flag=True, help="Simulate synthetic jobs on 64 GPUs under five policies instead; needs no torch."
)
@click.option(
    "--jobs", type=click.IntRange(min=10), default=1500, show_default=True, help="With --simulated: number of jobs."
)
@click.option("--seed", type=int, default=0, show_default=True, help="With --simulated: seed of the generated jobs.")
def demo(out: str, devices: str, quick: bool, simulated: bool, jobs: int, seed: int) -> int:
    """Train four small models one after another, then shared; compare times and final weights.

    Timelines and a report page are written to --out. Exit code 1 when weights differ or a job failed.
    """
    from carpool.core.errors import InputError, cause

    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"cannot create the directory: {cause(error)}", where=out, way_out="Choose another --out."
        ) from None
    if not simulated and find_spec("torch") is None:
        click.echo(
            "carpool: torch is not installed: running the simulated demo. "
            "For real trainings: pip install 'carpool[torch]'",
            err=True,
        )
        simulated = True
    if simulated:
        from carpool.cli.verbs.demo_runs import show_simulated_demo

        show_simulated_demo(folder, jobs, seed)
        return 0
    from carpool.cli.verbs.demo_runs import show_live_demo
    from carpool.cli.verbs.run import start_executor
    from carpool.jobs.devices import overlap_note, parse_devices

    parsed = parse_devices(devices)
    if note := overlap_note(parsed):
        click.echo(f"carpool: {note}", err=True)
    return show_live_demo(folder, parsed, start_executor, effort=0.5 if quick else 1.0)
