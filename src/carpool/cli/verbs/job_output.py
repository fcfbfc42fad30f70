"""``carpool logs`` and ``carpool get``: a job's log, weights and metrics."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from carpool.cli.support.daemon_client import connect, job_argument, name_suggestions, server_option
from carpool.cli.support.options import json_option, print_json, print_note
from carpool.cli.verbs.explain import run_option
from carpool.core.errors import InputError

if TYPE_CHECKING:
    from carpool.service.client import Client


_LOGS_EPILOG = """\b
Examples:
  carpool logs mlp
  carpool logs -f mlp
"""


@click.command("logs", epilog=_LOGS_EPILOG)
@job_argument
@click.option("--follow", "-f", is_flag=True, help="Print new output until the job ends.")
@click.option("--tail", default=0, metavar="BYTES", type=click.IntRange(0), help="Print only the last BYTES bytes.")
@server_option
@json_option
def logs(job: str, follow: bool, tail: int, server: str, as_json: bool) -> None:
    """Print what JOB has written to stdout and stderr."""
    from carpool.service.client import RequestDenied

    with connect(server) as client:
        try:
            _print_log(client, job, -tail if tail else 0, follow, as_json)
        except RequestDenied as denied:
            if denied.status != 404:
                raise
            raise InputError(f"{denied}{name_suggestions(client, job)}") from None


def _print_log(client: Client, job: str, start: int, follow: bool, as_json: bool) -> None:
    if as_json:
        print_json({"job": job, **client.log(job, start)})
        return
    if follow:
        for written in client.follow(job, start):
            sys.stdout.buffer.write(written)
            sys.stdout.flush()
        return
    while True:
        chunk = client.log(job, start)
        click.echo(chunk["text"], nl=False)
        if chunk["next"] == chunk["start"]:
            return
        start = chunk["next"]


_TRIES = 100
PLAIN_FILES = ("metrics.jsonl", "outcome.json", "story.jsonl", "log")  # copied unchanged


@click.command("get", epilog="Example: carpool get mlp-fast --run jobs --out weights")
@click.argument("job")
@run_option
@click.option("--out", default="", metavar="DIR", help="Target directory. [default: named after the job]")
@json_option
def get(job: str, run: str, out: str, as_json: bool) -> None:
    """Copy the weights of JOB, its metrics, outcome, history and log.

    Weights are state dicts for torch.load: final.pt (latest.pt while the job is unfinished), and best.pt if the
    training names a metric as `best`.
    """
    from carpool.cli.support.run_lookup import run_with
    from carpool.core.errors import cause

    folder = (None if run else _folder_from_daemon(job)) or run_with(job, run).job(job)
    target = Path(out or job)
    if not _checkpoints(folder) and not any((folder / name).is_file() for name in PLAIN_FILES):
        raise InputError(f"job {job!r} has no files yet", where=str(folder), way_out="Wait for its first checkpoint.")
    try:
        target.mkdir(parents=True, exist_ok=True)
        copied = [name for name in PLAIN_FILES if _copy(folder / name, target / name)]
        weights = _export(folder, target)
    except OSError as error:
        raise InputError(f"cannot write: {cause(error)}", where=str(target), way_out="Choose another --out.") from None
    files = [str(target / name) for name in (*weights, *copied)]
    if as_json:
        print_json({"job": job, "run": str(folder.parent.parent), "files": files})
        return
    for file in files:
        click.echo(file)
    if not weights:
        print_note(f"no weights: {job} has no checkpoint, or is a command")


def _copy(path: Path, target: Path) -> bool:
    """Copy a file of a job, without the discarded part of a long log; False where there is no readable one."""
    from carpool.jobs.untrusted_file import first_kept_byte, open_untrusted

    try:
        handle = open_untrusted(path)
    except OSError:
        return False
    with os.fdopen(handle, "rb") as source, target.open("wb") as copy:
        source.seek(first_kept_byte(handle))
        shutil.copyfileobj(source, copy)
    return True


def _export(folder: Path, target: Path) -> list[str]:
    """Export the newest and the best weights; tried again when a running job has deleted a checkpoint meanwhile."""
    if not _checkpoints(folder):
        return []
    from carpool.runtime.state.checkpoint import CheckpointGone, export_weights

    for _ in range(_TRIES):
        weights = _checkpoints(folder)
        try:
            for name, path in weights.items():
                export_weights(path, target / name)
        except CheckpointGone:
            continue
        return list(weights)
    raise InputError(
        f"its checkpoints are replaced faster than they can be read ({_TRIES} tries)",
        where=str(folder),
        way_out="Raise its checkpoint_s, or wait for its end.",
    )


def _folder_from_daemon(job: str) -> Path | None:
    """Directory of a job of this machine's daemon; None if no daemon knows the job.

    InputError where the job has none yet.
    """
    from carpool.cli.support.daemon_client import from_daemon
    from carpool.runtime.executor.job_folder import JobFolder
    from carpool.service.config import read_settings

    known = from_daemon(job, lambda client, name: client.job(name))
    if known is None:
        return None
    settings = read_settings(os.environ)
    folder = JobFolder(settings.state, job).path
    if not folder.is_dir():
        if settings["server"] and not settings["server"].startswith("unix:"):
            return None  # of another machine
        raise InputError(
            f"job {job!r} is {known['phase']} and has no checkpoint yet",
            where=str(folder),
            way_out=f"Wait until it has run for a while. Why it waits: carpool why {job}",
        )
    return folder


def _checkpoints(folder: Path) -> dict[str, Path]:
    """Newest and best checkpoint of a job by the file names of their exported weights."""
    steps = sorted(folder.rglob("step-*.ckpt"))  # zero-padded: the last is the newest
    best = sorted(folder.rglob("best.ckpt"))
    name = "final.pt" if (folder / "outcome.json").is_file() else "latest.pt"
    return {**({name: steps[-1]} if steps else {}), **({"best.pt": best[-1]} if best else {})}
