"""``carpool demo``: compare four trainings run one after another and shared."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from pathlib import Path

import click

from carpool.cli.support.options import print_note

_EPILOG = """\b
Examples:
  carpool demo
  carpool demo --devices cpu:4 --out shown
  carpool demo --simulated --jobs 2000
"""


@click.command("demo", epilog=_EPILOG)
@click.option("--out", default="out", show_default=True, metavar="DIR", help="Folder for timelines, page and runs.")
@click.option("--devices", default="", metavar="SPEC", help="As for run. [default: all free GPUs, else all cores]")
@click.option("--quick", is_flag=True, help="Train for fewer epochs: a quick check, too short to show the speed-up.")
@click.option("--simulated", is_flag=True, help="Simulate jobs on 64 GPUs under five policies; needs no torch.")
@click.option(
    "--jobs", type=click.IntRange(min=10), default=1500, show_default=True, help="With --simulated: number of jobs."
)
@click.option("--seed", type=int, default=0, show_default=True, help="With --simulated: seed of the generated jobs.")
def demo(out: str, devices: str, quick: bool, simulated: bool, jobs: int, seed: int) -> int:
    """Train four small models side by side, one after another, and by hand; compare times and final weights.

    By hand means plain PyTorch loops: each job alone with its best number of threads, and all jobs at once.

    Timelines and a report page are written to --out. Exit code 1 when weights differ or a job failed.
    """
    from carpool.core.errors import InputError, cause

    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot create: {cause(error)}", where=out, way_out="Choose another --out.") from None
    if not simulated and find_spec("torch") is None:
        print_note("torch is not installed: running the simulated demo. Install it: pip install 'carpool[torch]'")
        simulated = True
    if simulated:
        from carpool.cli.support.demo_runs import show_simulated_demo

        show_simulated_demo(folder, jobs, seed)
        return 0
    from carpool.cli.support.demo_runs import show_live_demo
    from carpool.cli.support.executor_start import start_executor, start_ready
    from carpool.jobs.devices import overlap_note, parse_devices
    from carpool.runtime.sharing.mps_daemon import check_lanes

    parsed = parse_devices(devices)
    check_lanes(parsed)
    if note := overlap_note(parsed):
        print_note(note)
    start = partial(start_ready, start=start_executor)  # torch is imported before the clock starts
    return show_live_demo(folder, parsed, start, effort=0.5 if quick else 1.0)
