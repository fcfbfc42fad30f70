"""Commands on the command line: what follows ``--`` becomes a job, with options for its keys."""

from __future__ import annotations

import os
import re
import shutil
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from carpool.core.errors import InputError

_COMMAND = "carpool.command"  # key of click's context
_SCRIPT = re.compile(r".+\.(py|sh|ipynb|pl|R|jl)")
_PYTHON = re.compile(r"python(3(\.\d+)?)?")


class ProgramCommand(click.Command):
    """A command whose arguments after ``--`` are another program with its own arguments."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        place = args.index("--") if "--" in args else None
        own = args[:place]
        if place is not None:
            ctx.meta[_COMMAND] = tuple(args[place + 1 :])
        try:
            return super().parse_args(ctx, list(own))
        except click.UsageError as error:
            raise _with_hint(error, own if place is None else []) from None

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- PROGRAM …]"]


def job_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that describe the program after ``--``."""
    options = [
        click.option("--name", default="", metavar="NAME", help="Name of the program's job. [default: its script]"),
        click.option("--resumable", is_flag=True, help="The program saves its state on SIGTERM and continues from it."),
        click.option(
            "--env",
            multiple=True,
            metavar="NAME[=VALUE]",
            help="Environment variable of the program; without a value, the current one. Repeatable.",
        ),
        click.option(
            "--set",
            "settings",
            multiple=True,
            metavar="KEY=VALUE",
            help="Any key of a job table, such as memory=6GiB or priority=high. Repeatable.",
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def given_program(
    name: str, resumable: bool, env: Sequence[str], settings: Sequence[str], jobs: str | None
) -> dict[str, Any] | None:
    """The job tables of the program after ``--``; None if there is none. InputError beside a job file."""
    command: tuple[str, ...] | None = click.get_current_context().meta.get(_COMMAND)
    if command is None:
        options = {"--name": name, "--resumable": resumable, "--env": env, "--set": settings}
        for option in (option for option, value in options.items() if value):
            raise InputError(f"{option} needs a program", way_out="Write it last: -- python train.py.")
        if jobs is not None and _is_program(jobs):
            raise _without_dashes([jobs])
        return None
    if not command or not command[0]:
        raise InputError("there is no program after --", way_out="Write one: -- python train.py --lr 0.1.")
    if jobs is not None:
        raise InputError(
            f"both the job file {jobs!r} and a program are given",
            way_out="Give one of them; options of the program go after its name.",
        )
    table = {**_settings(settings), **({"environment": _environment(env)} if env else {})}
    table |= {"resumable": True} if resumable else {}
    return {"job": [{"name": name or job_name(command), **_resolved(command), **table}]}


def _with_hint(error: click.UsageError, words: Sequence[str]) -> Exception:
    """The error with a hint: a program was given without ``--``, or a key of a job as an option."""
    from carpool.jobs.job_keys import KEYS

    place = next((place for place, word in enumerate(words) if _is_program(word)), None)
    if place is not None:
        return _without_dashes(words[place:])
    key = error.option_name.strip("-").replace("-", "_") if isinstance(error, click.NoSuchOption) else ""
    if key in KEYS:
        way_out = f"{key} is a key of a job: --set {key}=VALUE, or a line of the job file."
        return InputError(f"no such option '--{key}'", way_out=way_out)
    return error


def _is_program(word: str) -> bool:
    """Whether a word that should be a job file names a script, an entry or a program."""
    is_script = _SCRIPT.fullmatch(word.partition(":")[0]) is not None
    return is_script or (not word.startswith("-") and not Path(word).exists() and shutil.which(word) is not None)


def _without_dashes(words: Sequence[str]) -> InputError:
    """The error for a program, script or entry in place of a job file."""
    file, colon, _ = words[0].partition(":")
    if colon and _SCRIPT.fullmatch(file):
        way_out = f'Write one with these lines: [[job]], name = "mine", entry = "{words[0]}".'
    else:
        command = [*(["python"] if file.endswith(".py") else []), *words]
        way_out = f"Write -- before a program: -- {' '.join(command)}."
    return InputError(f"{words[0]!r} is not a job file", way_out=way_out)


def job_name(command: Sequence[str]) -> str:
    """The script of a command, the module behind ``-m``, or its program; as a valid job name."""
    name = Path(command[0]).name
    for word, after in zip(command, (*command[1:], ""), strict=True):
        if word == "-m" or _SCRIPT.fullmatch(word):
            name = after if word == "-m" else Path(word).stem
            break
    return re.sub(r"[^\w.\-]+", "-", name, flags=re.ASCII).strip("-._")[:90] or "command"


def _resolved(command: Sequence[str]) -> dict[str, Any]:
    """The command, with the interpreter that the user's shell would choose for ``python``."""
    interpreter = shutil.which(command[0]) if _PYTHON.fullmatch(command[0]) else None
    if interpreter is None:
        return {"command": list(command)}
    return {"command": ["python", *command[1:]], "python": os.path.abspath(interpreter)}  # noqa: PTH100 - keep links


def _settings(settings: Sequence[str]) -> dict[str, Any]:
    """``key=value`` pairs; a value is TOML, or else text."""
    values: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key:
            raise InputError(f"--set {setting!r} is not KEY=VALUE", way_out="Write for example --set memory=6GiB.")
        if key in {"name", "command", "entry"}:
            raise InputError(f"--set cannot change {key!r}", way_out="Use --name, or write the program after --.")
        try:
            values[key] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            values[key] = text
    return values


def _environment(variables: Sequence[str], current: Mapping[str, str] = os.environ) -> dict[str, str]:
    found: dict[str, str] = {}
    for variable in variables:
        name, equals, value = variable.partition("=")
        if not equals and name not in current:
            raise InputError(f"--env {name}: the variable is not set", way_out=f"Give a value: --env {name}=…")
        found[name] = value if equals else current[name]
    return found
