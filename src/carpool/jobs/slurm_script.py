"""Batch script for Slurm: a run that stops before the time limit, is requeued, and resumes in the next allocation."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from carpool.core.errors import InputError

RUN_FILE = "run.json"  # a state folder with this file holds a run that can be resumed


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """What a batch script runs, and what it asks Slurm for."""

    jobs: Path  # the job file
    state: Path
    python: str
    time: str  # limit of one allocation, in Slurm's notation
    nodes: int = 1
    stop_s: int = 120  # before that limit
    options: Sequence[str] = ()  # further options of sbatch
    arguments: Sequence[str] = ()  # further arguments of carpool run


def batch_script(job: SlurmJob) -> str:
    """The text of the batch script.

    Slurm signals only the batch shell, which passes the signal on; the run then stops with checkpoints and exits with
    130 (or is ended by the signal while it starts). Any other end is final: a job that fails is not requeued.
    """
    name = f"carpool-{job.jobs.stem}"
    own = (f"--job-name={name}", f"--nodes={job.nodes}", f"--time={job.time}", f"--signal=B:TERM@{job.stop_s}")
    resilience = ("--no-kill",) if job.nodes > 1 else ()  # the run goes on without a node that fails
    options = (*own, "--requeue", "--open-mode=append", *resilience, *job.options)
    for option in options:
        if "\n" in option or not option.startswith("-"):
            raise InputError(f"{option!r} is not an option of sbatch", way_out="Write it as --account=lab.")
    engine = ("--engine", "slurm") if job.nodes > 1 else ()  # its one srun launches an agent on every node
    words = (job.python, "-m", "carpool", "run", str(job.jobs), "--state", str(job.state), *engine, *job.arguments)
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {option}" for option in options),
            f"cd {shlex.quote(str(job.jobs.parent))} || exit 2",
            f"run=({shlex.join(words)})",
            f"if [ -e {shlex.quote(str(job.state / RUN_FILE))} ]; then run+=(--resume); fi",
            '"${run[@]}" &',
            "pid=$! stopped=",
            "trap 'stopped=1; kill -TERM \"$pid\"' TERM",
            'wait "$pid"; code=$?',
            "# The signal ends the first wait, before the run has ended.",
            'if [ -n "$stopped" ] && [ "$code" -eq 143 ]; then wait "$pid"; code=$?; fi',
            'if [ -n "$stopped" ] && [ "$code" -ge 127 ]; then exec scontrol requeue "$SLURM_JOB_ID"; fi',
            'exit "$code"',
            "",
        ]
    )
