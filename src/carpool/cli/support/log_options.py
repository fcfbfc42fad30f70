"""Options ``--log-level`` and ``--log-format`` of the verbs that schedule jobs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from carpool.logs import FORMATS, LEVELS


def log_options(default: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add both options to a command; `default` names the level without them."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        level = click.option(
            "--log-level",
            type=click.Choice(LEVELS),
            default=None,
            help=f"What is logged to stderr: decisions and orders from info on. [default: {default}]",
        )
        fmt = click.option(
            "--log-format",
            type=click.Choice(FORMATS),
            default=None,
            help="text, or json for one object per line. [default: text]",
        )
        return level(fmt(command))

    return add
