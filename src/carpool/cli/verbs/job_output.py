"""``carpool logs`` and ``carpool get``: a job's log, weights and metrics."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from carpool.cli.support.daemon_client import connect, from_daemon, job_argument, name_suggestions, server_option
from carpool.cli.support.options import json_option, print_json, print_note
from carpool.cli.verbs.explain import run_option
from carpool.core.errors import InputError

if TYPE_CHECKING:
    from carpool.service.client import Json


_LOGS_EPILOG = """\b
Examples:
  carpool logs mlp
  carpool logs -f mlp
  carpool logs mlp --run jobs --tail 20
"""
_FIRST_WINDOW, _MAX_WINDOW = 1 << 14, 1 << 26  # bytes before the end that are searched for the last lines
_CHUNK_BYTES = 1 << 20
_POLL_S = 0.3

ReadLog = Callable[[int], "Json"]  # from a byte, or from the end: text, start, next, is_over


@click.command("logs", epilog=_LOGS_EPILOG)
@job_argument
@click.option("--follow", "-f", is_flag=True, help="Print new output until the job ends.")
@click.option(
    "--tail", "-n", default=0, metavar="LINES", type=click.IntRange(0), help="Print only the last LINES lines."
)
@run_option
@server_option
@json_option
def logs(job: str, follow: bool, tail: int, run: str, server: str, as_json: bool) -> None:
    """Print what JOB has written to stdout and stderr: a job of the daemon, or of a run in this folder."""
    from carpool.service.client import RequestDenied, Unreachable

    if run:
        _print_log(_run_log(job, run), job, tail, follow, as_json)
        return
    with connect(server) as client:
        try:
            _print_log(lambda start: client.log(job, start), job, tail, follow, as_json)
        except (RequestDenied, Unreachable) as error:
            if isinstance(error, RequestDenied) and error.status != 404:
                raise
            if not server and (read := _run_log_if_any(job)) is not None:
                _print_log(read, job, tail, follow, as_json)
            elif isinstance(error, Unreachable):
                raise (
                    error if server else Unreachable(f"no run in .carpool/runs has job {job!r}, and {error}")
                ) from None
            else:
                raise InputError(f"{error}{name_suggestions(client, job)}") from None


def _run_log_if_any(job: str) -> ReadLog | None:
    try:
        return _run_log(job, "")
    except InputError:
        return None


def _run_log(job: str, run: str) -> ReadLog:
    """The log of a job of a run."""
    from carpool.cli.support.run_lookup import run_with
    from carpool.service.queries.present import read_log

    folder = run_with(job, run).job(job)

    def read(start: int) -> Json:
        is_over = (folder / "outcome.json").is_file()
        return asdict(read_log(folder / "log", start, _CHUNK_BYTES, is_over=is_over))

    return read


def _print_log(read: ReadLog, job: str, tail: int, follow: bool, as_json: bool) -> None:
    chunk = _last_lines(read, tail) if tail else read(0)
    if as_json:
        print_json({"job": job, **chunk})
        return
    while True:
        sys.stdout.write(chunk["text"])
        sys.stdout.flush()
        if chunk["next"] == chunk["start"] and (chunk["is_over"] or not follow):
            return
        if chunk["next"] == chunk["start"]:
            time.sleep(_POLL_S)
        chunk = read(chunk["next"])


def _last_lines(read: ReadLog, lines: int) -> Json:
    """The last lines of a log, as one chunk."""
    window, start = _FIRST_WINDOW, -1
    while True:
        first = last = read(-window)
        text: str = first["text"]
        while last["next"] != last["start"]:
            last = read(last["next"])
            text += last["text"]
        is_whole = first["start"] in (0, start)  # the oldest part of a long log is discarded
        if is_whole or text.count("\n") > lines or window >= _MAX_WINDOW:
            return {**last, "start": first["start"], "text": "".join(text.splitlines(keepends=True)[-lines:])}
        window, start = window * 4, first["start"]


_TRIES = 100
PLAIN_FILES = ("metrics.jsonl", "outcome.json", "story.jsonl", "log")  # copied unchanged


@click.command("get", epilog="Example: carpool get mlp-fast --run jobs --out weights")
@click.argument("job")
@run_option
@click.option("--out", default="", metavar="DIR", help="Folder to copy to. [default: named after the job]")
@server_option
@json_option
def get(job: str, run: str, out: str, server: str, as_json: bool) -> None:
    """Copy the weights of JOB, its metrics, outcome, history and log.

    Weights are state dicts for torch.load: final.pt (latest.pt while the job is unfinished), and best.pt if the
    training names a metric as `best`.
    """
    from carpool.cli.support.run_lookup import run_with
    from carpool.core.errors import cause

    folder = (None if run else _folder_from_daemon(job, server)) or run_with(job, run).job(job)
    target = Path(out or job)
    if not _checkpoints(folder) and not any((folder / name).is_file() for name in PLAIN_FILES):
        raise InputError(
            f"job {job!r} has no files",
            where=str(folder),
            way_out="A running job has files after its first checkpoint.",
        )
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
        print_note(_without_weights(job, is_over=(folder / "outcome.json").is_file()))


def _without_weights(job: str, *, is_over: bool) -> str:
    if is_over:
        return f"no weights: {job} ended without a checkpoint; a command has none unless it uses carpool.session"
    return f"no weights yet: {job} has made no checkpoint (every checkpoint_every, 60 s by default), or is a command"


def _copy(path: Path, target: Path) -> bool:
    """Copy a job's file without its holes; False if there is no readable file."""
    from carpool.jobs.untrusted_file import next_data, open_untrusted

    try:
        handle = open_untrusted(path)
    except OSError:
        return False
    with os.fdopen(handle, "rb") as source, target.open("wb") as copy:
        start, stop = next_data(handle, 0)
        while start < stop:
            source.seek(start)
            while start < stop and (part := source.read(min(_CHUNK_BYTES, stop - start))):
                copy.write(part)
                start += len(part)
            start, stop = next_data(handle, max(start, stop))
    return True


def _export(folder: Path, target: Path) -> list[str]:
    """Export the newest and the best weights; retried if a running job has deleted a checkpoint meanwhile."""
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


def _folder_from_daemon(job: str, server: str) -> Path | None:
    """Directory of a job of a daemon of this machine; None if no daemon knows the job.

    InputError if the job has none yet, or has it on another machine.
    """
    from carpool.core.model import Phase
    from carpool.runtime.executor.job_folder import JobFolder
    from carpool.service.config import read_settings

    known = from_daemon(job, lambda client, name: client.job(name), server)
    if known is None:
        return None
    settings = read_settings(os.environ)
    address = server or settings["server"]
    socket = address.removeprefix("unix:")
    states = [settings.state] if socket == address else [Path(socket).parent, settings.state]
    for folder in [JobFolder(state, job).path for state in states]:
        if folder.is_dir():
            return folder
    if address and socket == address:
        raise InputError(
            f"the files of job {job!r} are on the machine of the daemon, {address}",
            way_out="Run carpool get there, or set CARPOOL_STATE to its state folder if it is mounted here.",
        )
    phase = Phase(known["phase"])
    if phase.is_over:
        raise InputError(f"job {job!r} is {phase}, and its folder is gone", where=str(states[0]))
    raise InputError(f"job {job!r} is {phase} and has no files yet", way_out=f"Why: carpool why {job}")


def _checkpoints(folder: Path) -> dict[str, Path]:
    """Newest and best checkpoint of a job by the file names of their exported weights."""
    steps = sorted(folder.rglob("step-*.ckpt"))  # zero-padded: the last is the newest
    best = sorted(folder.rglob("best.ckpt"))
    name = "final.pt" if (folder / "outcome.json").is_file() else "latest.pt"
    return {**({name: steps[-1]} if steps else {}), **({"best.pt": best[-1]} if best else {})}
