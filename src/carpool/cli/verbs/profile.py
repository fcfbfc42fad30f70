"""``carpool profile``: measure rate, memory and gradient noise of one training, and save the profile."""

from __future__ import annotations

import asyncio
import json
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from carpool import __version__
from carpool.core.errors import InputError, UnknownName
from carpool.jobs.entry_file import check_entry
from carpool.jobs.job_file import read_jobs
from carpool.jobs.program import Program
from carpool.jobs.toml_table import Table

if TYPE_CHECKING:
    from carpool.runtime.profiling.profiler import Tell


def find_program(text: str, args_text: str = "") -> Program:
    """The program that a text names, checked as far as that is possible without running it."""
    source, colon, name = text.rpartition(":")
    if not colon or not source or not name:
        raise InputError(
            f"{text!r} names no training", way_out="Write file.py:function, or jobs.toml:NAME for a job of a file."
        )
    args = parse_args(args_text)
    if source.endswith(".toml"):
        if args_text:
            raise InputError("--args is given for a job of a file", way_out="The job file has its arguments.")
        return _job(Path(source), name)
    if not source.endswith(".py"):
        check_entry(text, args, Path(), "ENTRY")
        return Program(text, args, folder=str(Path.cwd()))
    path = Path(source)
    entry = f"{path.name}:{name}"
    check_entry(entry, args, path.parent, "ENTRY")
    return Program(entry, args, folder=str(path.parent.resolve()))


def parse_args(text: str) -> dict[str, Any]:
    """``{ lr = 0.1 }``, as in a job file."""
    if not text:
        return {}
    try:
        values = tomllib.loads(f"args = {text}")
    except tomllib.TOMLDecodeError as error:
        raise InputError(
            f"{text!r} is no TOML table: {error}", where="--args", way_out="Write '{ lr = 0.1 }'."
        ) from None
    return Table(values, "--args").mapping("args")


def _job(path: Path, name: str) -> Program:
    jobs = {str(spec.id): program for spec, program in read_jobs(path).jobs}
    if name not in jobs:
        raise UnknownName("job", name, jobs, where=str(path))
    if not jobs[name].entry:
        raise InputError(
            f"job {name!r} is a command, which cannot be watched", where=str(path), way_out="Name a job with an entry."
        )
    return jobs[name]


_EPILOG = """\b
Examples:
  carpool profile examples/digits.py:mlp
  carpool profile examples/jobs.toml:digits-cnn --batches 32,64,128 --devices cpu:2 --shares 0.5,1
  carpool profile digits.py:mlp --args '{ lr = 0.3 }' --with digits.py:cnn --json
"""


@click.command("profile", epilog=_EPILOG)
@click.argument("entry", metavar="ENTRY")
@click.option("--args", "args_text", default="", metavar="TABLE", help="Arguments of the function: '{ lr = 0.1 }'.")
@click.option("--batches", default="", metavar="M,M…", help="Batch sizes. [default: doublings around its own]")
@click.option("--devices", default="", metavar="SPEC", help="As for run. [default: all GPUs, else all cores]")
@click.option(
    "--shares", default="1", metavar="F,F…", help="Shares of a device, above 0 and at most 1.", show_default=True
)
@click.option("--with", "other", default="", metavar="ENTRY", help="Measure it beside this training too.")
@click.option("--seconds", default=2.0, metavar="S", help="Of steps that count, in each setting.", show_default=True)
@click.option("--timeout", default=120.0, metavar="S", help="After which a setting is given up.", show_default=True)
@click.option("--memory", default="", metavar="BYTES", help="That a process may take: 2GiB. [default: most there is]")
@click.option("--no-exact", is_flag=True, help="Do not measure the price of exact = true.")
@click.option("--no-noise", is_flag=True, help="Do not measure the gradient noise.")
@click.option("--out", default="", metavar="FILE", help="Where the profile goes. [default: .carpool/profiles/…]")
@click.option("--json", "as_json", is_flag=True, help="Print the profile as JSON and nothing else.")
def profile(
    entry: str,
    args_text: str,
    batches: str,
    devices: str,
    shares: str,
    other: str,
    seconds: float,
    timeout: float,
    memory: str,
    no_exact: bool,
    no_noise: bool,
    out: str,
    as_json: bool,
) -> None:
    """Measure the training of ENTRY and save what was found.

    ENTRY is file.py:function, or jobs.toml:NAME for a job of a file. Batch sizes are varied on one device of each kind,
    everything else (more devices, shares, exact, a neighbour) at the training's own batch; each setting runs in
    processes of its own, as a real run would. `plan`, `run` and `simulate --world profile:FILE` read the profile.
    """
    from carpool.backends.profile_library import save_profile
    from carpool.cli.render.profile_table import print_profile
    from carpool.cli.verbs.profile import find_program
    from carpool.core.units import parse_bytes
    from carpool.jobs.devices import overlap_note, parse_devices
    from carpool.predictors.profiles.profile import profile_to_json
    from carpool.runtime.profiling.profiler import MeasurementBudget, ProfileRequest, make_profile

    program = find_program(entry, args_text)
    wanted = ProfileRequest(
        batches=whole_numbers(batches, "--batches"),
        shares=fractions(shares, "--shares"),
        beside=find_program(other) if other else None,
        exact=not no_exact,
        noise=not no_noise,
    )
    patience = MeasurementBudget(
        positive(seconds, "--seconds"), positive(timeout, "--timeout"), parse_bytes(memory or 0, "--memory")
    )
    found = parse_devices(devices)
    if note := overlap_note(found):
        click.echo(f"carpool: {note}", err=True)
    with progress_reporter(quiet=as_json) as tell:
        profile = asyncio.run(make_profile(program, found, wanted, patience, __version__, tell))
    path = save_profile(profile, Path(out) if out else None)
    if as_json:
        click.echo(json.dumps({**profile_to_json(profile), "path": str(path)}))
        return
    print_profile(profile)
    click.echo(f"kept in {path}")


@contextmanager
def progress_reporter(*, quiet: bool) -> Iterator[Tell]:
    """Progress on a terminal, lines elsewhere, nothing where a program reads."""
    if quiet:
        yield lambda done, total, words: None
    elif not sys.stderr.isatty():
        yield lambda done, total, words: click.echo(f"{done + 1}/{total}  {words}", err=True)
    else:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            bar = progress.add_task("starting", total=1)
            yield lambda done, total, words: progress.update(bar, completed=done, total=total, description=words)


def whole_numbers(text: str, where: str) -> tuple[int, ...]:
    """``32,64,128`` as numbers."""
    from carpool.core.errors import InputError

    parts = [part.strip() for part in text.split(",") if part.strip()]
    for part in parts:
        if not part.isdecimal() or int(part) < 1:
            raise InputError(f"{part!r} in {text!r}", where=where, way_out="Give whole numbers above 0: 32,64,128.")
    return tuple(int(part) for part in parts)


def fractions(text: str, where: str) -> tuple[float, ...]:
    """``0.5,1`` as shares."""
    from carpool.core.errors import InputError

    found = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        try:
            share = float(part)
        except ValueError:
            share = 0.0
        if not 0.0 < share <= 1.0:
            raise InputError(f"{part!r} in {text!r}", where=where, way_out="Give shares above 0 and at most 1: 0.5,1.")
        found.append(share)
    return tuple(sorted(set(found))) or (1.0,)


def positive(value: float, where: str) -> float:
    """A number above 0."""
    from carpool.core.errors import InputError

    if not 0.0 < value < float("inf"):
        raise InputError(f"{value:g}", where=where, way_out="Give seconds above 0.")
    return value
