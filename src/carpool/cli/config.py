"""``carpool config``: what is set, and where each value came from."""

from __future__ import annotations

import os

import click

from carpool.cli.asking import print_json
from carpool.cli.flags import json_option


@click.group("config", epilog="Example: carpool config show")
def command() -> None:
    """Look at the settings of the daemon and of those who ask it."""


@command.command("show", epilog="Example: CARPOOL_PORT=8000 carpool config show")
@json_option
def show(as_json: bool) -> None:
    """Print every setting, its value and where that came from.

    What is said later wins: the default, the file (~/.config/carpool/config.toml, or what CARPOOL_CONFIG names), a
    variable CARPOOL_NAME, a flag.
    """
    from carpool.cli.job_rows import as_columns
    from carpool.service.config import SETTINGS, config_file, read_settings

    settings = read_settings(os.environ)
    rows = []
    for setting in SETTINGS.values():
        value = settings[setting.name]
        shown = ("…" if value else "") if setting.is_secret else ",".join(value) if isinstance(value, tuple) else value
        rows.append((setting.name, shown, settings.origins[setting.name], setting.about))
    if as_json:
        keys = ("name", "value", "from", "about")
        values = [dict(zip(keys, row, strict=True)) for row in rows]
        print_json({"file": str(config_file(os.environ)), "settings": values, "users": dict(settings.users)})
        return
    for line in as_columns(("setting", "value", "from", "about"), [tuple(map(str, row)) for row in rows]):
        click.echo(line)
    for name, table in settings.users.items():
        click.echo(f"users.{name}  {table}")
