"""``carpool profile``: measure rate, memory and gradient noise of one training, and save the profile."""

from __future__ import annotations

import asyncio
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from carpool import __version__
from carpool.cli.support.options import json_option, print_json, print_note
from carpool.core.errors import InputError, UnknownName

if TYPE_CHECKING:
    from carpool.jobs.program import Program
    from carpool.runtime.profiling.profiler import Tell


_EPILOG = """\b
Examples:
  carpool profile examples/digits.py:mlp
  carpool profile examples/jobs.toml:digits-cnn --batches 32,64,128 --devices cpu:2 --shares 0.5,1
  carpool profile digits.py:mlp --args '{ lr = 0.3 }' --with digits.py:cnn --json
"""


@click.command("profile", epilog=_EPILOG)
@click.argument("entry", metavar="ENTRY")
@click.option(
    "--args", "args_text", default="", metavar="TABLE", help="Arguments of the entry, as in a job file: '{ lr = 0.1 }'."
)
@click.option("--batches", default="", metavar="M,M…", help="Batch sizes. [default: 1/8 to 4 times the training's own]")
@click.option("--devices", default="", metavar="SPEC", help="As for run. [default: all free GPUs, else all cores]")
@click.option("--shares", default="1", metavar="F,F…", show_default=True, help="Shares of a device, at most 1.")
@click.option(
    "--with", "other", default="", metavar="ENTRY", help="Also measure with this training on the same device."
)
@click.option("--seconds", default=2.0, metavar="S", show_default=True, help="Seconds of steps to time per setting.")
@click.option("--timeout", default=120.0, metavar="S", show_default=True, help="Abandon a setting after S seconds.")
@click.option(
    "--memory", default="", metavar="SIZE", help="Memory limit per process, such as 2GiB. [default: most of the RAM]"
)
@click.option("--no-exact", is_flag=True, help="Do not measure the overhead of exact = true.")
@click.option("--no-noise", is_flag=True, help="Do not measure the gradient noise scale.")
@click.option("--out", default="", metavar="FILE", help="File for the profile. [default: in .carpool/profiles]")
@json_option
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
    """Measure step time, memory use and gradient noise of a training, and save the profile.

    ENTRY is file.py:function, or jobs.toml:NAME for a job of a file. Batch sizes are varied on one device of each
    type; more devices, shares, exact mode and a second training are measured at the training's own batch size. Each
    setting runs in separate processes, as in a real run. `plan`, `run` and `simulate --world profile:FILE` use the
    profile.
    """
    from carpool.backends.profile_library import save_profile
    from carpool.cli.render.profile_table import print_profile
    from carpool.core.units import parse_bytes
    from carpool.jobs.devices import overlap_note, parse_devices
    from carpool.predictors.profiles.profile import profile_to_json
    from carpool.runtime.profiling.profiler import MeasurementBudget, ProfileRequest, make_profile
    from carpool.runtime.sharing.mps_daemon import check_lanes

    program = find_program(entry, args_text)
    share_list = _parse_list(shares, "--shares", _share, "Give shares above 0 and at most 1: 0.5,1.")
    request = ProfileRequest(
        batches=_parse_list(batches, "--batches", _batch, "Give whole numbers above 0: 32,64,128."),
        shares=tuple(sorted(set(share_list))) or (1.0,),
        beside=find_program(other) if other else None,
        exact=not no_exact,
        noise=not no_noise,
    )
    budget = MeasurementBudget(
        _positive(seconds, "--seconds"), _positive(timeout, "--timeout"), parse_bytes(memory or 0, "--memory")
    )
    parsed = parse_devices(devices)
    check_lanes(parsed)
    if note := overlap_note(parsed):
        print_note(note)
    with progress_reporter(quiet=as_json) as report:
        profile = asyncio.run(make_profile(program, parsed, request, budget, __version__, report))
    path = save_profile(profile, Path(out) if out else None)
    if as_json:
        print_json({**profile_to_json(profile), "path": str(path)})
        return
    print_profile(profile)
    click.echo(f"saved to {path}")


def find_program(text: str, args_text: str = "") -> Program:
    """Program named by ``file.py:function`` or ``jobs.toml:NAME``, checked as far as possible without running it."""
    from carpool.jobs.entry_file import check_entry
    from carpool.jobs.program import Program

    source, colon, name = text.rpartition(":")
    if not colon or not source or not name:
        raise InputError(
            f"{text!r} is not an entry", way_out="Write file.py:function, or jobs.toml:NAME for a job of a file."
        )
    if source.endswith(".toml"):
        if args_text:
            raise InputError("--args cannot be combined with a job file", way_out="Set args in the job file.")
        return _listed_program(Path(source), name)
    args = _parse_args(args_text)
    entry, folder = text, Path()
    if source.endswith(".py"):
        entry, folder = f"{Path(source).name}:{name}", Path(source).parent
    check_entry(entry, args, folder, "ENTRY")
    return Program(entry, args, folder=str(folder.resolve()))


def _parse_args(text: str) -> dict[str, Any]:
    """Parse ``{ lr = 0.1 }``, a TOML table as in a job file."""
    from carpool.jobs.toml_table import Table

    if not text:
        return {}
    try:
        values = tomllib.loads(f"args = {text}")
    except tomllib.TOMLDecodeError as error:
        raise InputError(
            f"{text!r} is not a TOML table: {error}", where="--args", way_out="Write '{ lr = 0.1 }'."
        ) from None
    return Table(values, "--args").mapping("args")


def _listed_program(path: Path, name: str) -> Program:
    from carpool.jobs.job_file import read_jobs

    jobs = {str(spec.id): program for spec, program in read_jobs(path).jobs}
    if name not in jobs:
        raise UnknownName("job", name, jobs, where=str(path))
    if not jobs[name].entry:
        raise InputError(
            f"job {name!r} is a command; only trainings with an entry can be profiled",
            where=str(path),
            way_out="Choose a job with an entry.",
        )
    return jobs[name]


@contextmanager
def progress_reporter(*, quiet: bool) -> Iterator[Tell]:
    """Report progress as a bar on a terminal, as lines elsewhere, not at all if `quiet`."""
    if quiet:
        yield lambda done, total, label: None
    elif not sys.stderr.isatty():
        yield lambda done, total, label: click.echo(f"{done + 1}/{total}  {label}", err=True)
    else:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            bar = progress.add_task("starting", total=1)
            yield lambda done, total, label: progress.update(bar, completed=done, total=total, description=label)


Value = TypeVar("Value")


def _parse_list(text: str, option: str, parse: Callable[[str], Value | None], way_out: str) -> tuple[Value, ...]:
    """Parse comma-separated values; InputError for one that `parse` maps to None."""
    values = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        value = parse(part)
        if value is None:
            raise InputError(f"{part!r} is not valid", where=option, way_out=way_out)
        values.append(value)
    return tuple(values)


def _batch(text: str) -> int | None:
    return int(text) if text.isdecimal() and int(text) > 0 else None


def _share(text: str) -> float | None:
    try:
        share = float(text)
    except ValueError:
        return None
    return share if 0.0 < share <= 1.0 else None


def _positive(value: float, option: str) -> float:
    if not 0.0 < value < float("inf"):
        raise InputError(f"{value:g}", where=option, way_out="Give seconds above 0.")
    return value
