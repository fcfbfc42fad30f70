"""Trainings by the words of the command line: ``file.py:function``, or ``jobs.toml:NAME`` for a job of a file."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from carpool.core.errors import InputError, UnknownName
from carpool.runtime.entryfile import check_entry
from carpool.runtime.jobfile import read_jobs
from carpool.runtime.program import Program
from carpool.runtime.reading import Table


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
