"""Options and output that verbs share: ``--json``, ``--log-level``, notes on stderr, and a guard for stdout."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, redirect_stdout
from typing import Any, TextIO

import click

DEVICES_HELP = (
    "cpu:4: four devices that share the cores evenly; cpu:2x1,1x2: two of 1 core, one of 2; cuda: all GPUs; "
    "cuda:0,1: these; cuda:0@50,cuda:0@25: lanes (fixed shares) of 50 and 25 % of GPU 0. "
    "[default: all free GPUs, else all cores]"
)

MEMORY_CAP_HELP = (
    "Memory limit of all jobs on a device together: jobs take turns, idle ones are swapped to host memory. "
    "[default: none]"
)

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON only.")


sweep_option = click.option(
    "--sweep",
    "sweep",
    multiple=True,
    metavar="NAME=V,V…",
    help="Run each job once for every value: an argument of its entry, or {NAME} in its command. Repeatable.",
)


def print_json(document: Mapping[str, Any]) -> None:
    """Print a JSON document, with schema version 1 unless it has another."""
    click.echo(json.dumps({"schema": 1, **document}))


def print_note(message: object) -> None:
    """Print a note, warning or error to stderr."""
    click.echo(f"carpool: {message}", err=True)


def guard_stdout() -> AbstractContextManager[TextIO]:
    """Redirect stdout to stderr, so that a user's policy that prints does not corrupt the result."""
    return redirect_stdout(sys.stderr)


def log_options(default: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add ``--log-level`` and ``--log-format`` to a command; `default` names the level without them."""
    from carpool.logs import FORMATS, LEVELS

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        level = click.option(
            "--log-level",
            type=click.Choice(LEVELS),
            default=None,
            help=f"Log level on stderr; info includes decisions and orders. [default: {default}]",
        )
        fmt = click.option(
            "--log-format",
            type=click.Choice(FORMATS),
            default=None,
            help="text, or json for one object per line. [default: text]",
        )
        return level(fmt(command))

    return add
