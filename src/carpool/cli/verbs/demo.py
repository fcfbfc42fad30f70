"""``carpool demo``: compare four trainings run one after another and shared, without any preparation."""

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
@click.option("--out", default="out", show_default=True, metavar="DIR", help="Where timelines, page and runs go.")
@click.option("--devices", default="", metavar="SPEC", help="cpu:4, cuda … [default: all GPUs, else all cores]")
@click.option("--quick", is_flag=True, help="A few epochs only: to see that it works, not what it gains.")
@click.option("--simulated", is_flag=True, help="Made-up jobs on 64 GPUs under five policies instead; needs no torch.")
@click.option(
    "--jobs", type=click.IntRange(min=10), default=1500, show_default=True, help="With --simulated: how many jobs."
)
@click.option("--seed", type=int, default=0, show_default=True, help="With --simulated: another seed, other jobs.")
def demo(out: str, devices: str, quick: bool, simulated: bool, jobs: int, seed: int) -> int:
    """Train four small models one after another and then shared, compare times and weights, save the timelines."""
    from carpool.core.errors import InputError, cause

    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot be made: {cause(error)}", where=out, way_out="Name a folder with --out.") from None
    if not simulated and find_spec("torch") is None:
        click.echo(
            "carpool: torch is not installed, so this is the simulated demo. "
            "For the real one: pip install 'carpool[torch]'",
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

    found = parse_devices(devices)
    if note := overlap_note(found):
        click.echo(f"carpool: {note}", err=True)
    return show_live_demo(folder, found, start_executor, effort=0.5 if quick else 1.0)
