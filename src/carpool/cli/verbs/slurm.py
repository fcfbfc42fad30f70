"""``carpool slurm``: run jobs inside a Slurm allocation and resume them in the next one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click

from carpool.core.errors import InputError

_EPILOG = """\b
Examples:
  carpool slurm jobs.toml --time 4:00:00 --sbatch=--gpus-per-node=4
  carpool slurm jobs.toml --time 4:00:00 --nodes 4 --sbatch=--gpus-per-node=8
  carpool slurm jobs.toml --time 30 --sbatch=--partition=short --no-submit
"""


@click.command("slurm", epilog=_EPILOG)
@click.argument("jobs")
@click.option(
    "--time", "limit", required=True, metavar="TIME", help="Time limit of one allocation, as sbatch takes it."
)
@click.option("--nodes", default=1, show_default=True, type=click.IntRange(1), help="Nodes of one allocation.")
@click.option(
    "--stop-before",
    default=120,
    show_default=True,
    type=click.IntRange(1, 65535),
    metavar="SECONDS",
    help="Stop with checkpoints this long before the limit.",
)
@click.option(
    "--state", default="", metavar="DIR", help="State folder, on a shared disk. [default: .carpool/slurm/NAME]"
)
@click.option("--sbatch", "options", multiple=True, metavar="OPTION", help="Further option of sbatch; may be repeated.")
@click.option("--run", "arguments", multiple=True, metavar="ARG", help="Further argument of carpool run; repeatable.")
@click.option("--no-submit", is_flag=True, help="Only write the script.")
def slurm(
    jobs: str,
    limit: str,
    nodes: int,
    stop_before: int,
    state: str,
    options: tuple[str, ...],
    arguments: tuple[str, ...],
    no_submit: bool,
) -> None:
    """Run a job file on nodes of a Slurm cluster, in as many allocations as it takes.

    Writes the batch script NAME.slurm beside the job file and submits it. Before the time limit all jobs stop with
    checkpoints, the batch job is requeued, and the next allocation resumes them.
    """
    from carpool.jobs.job_file import read_jobs
    from carpool.jobs.slurm_script import SlurmJob, batch_script

    file = Path(jobs).absolute()
    read_jobs(file)
    folder = Path(state).absolute() if state else file.parent / ".carpool" / "slurm" / file.stem
    job = SlurmJob(file, folder, sys.executable, limit, nodes, stop_before, options, arguments)
    script = file.with_suffix(".slurm")
    script.write_text(batch_script(job), encoding="utf-8")
    click.echo(script)
    if not no_submit:
        click.echo(_submit(script))


def _submit(script: Path) -> str:
    command = ["sbatch", str(script)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        way_out = "Run it on a login node of the cluster, or write the script only: --no-submit."
        raise InputError("sbatch is not installed here", way_out=way_out) from None
    if done.returncode:
        raise InputError(f"sbatch refused the script: {done.stderr.strip()[-300:]}", where=str(script))
    return done.stdout.strip()
