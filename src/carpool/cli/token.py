"""``carpool token``: who may ask the daemon over the network, and as whom."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import click

from carpool.cli.asking import print_json
from carpool.cli.flags import json_option

if TYPE_CHECKING:
    from carpool.service.tokens import AccessTokens

state_option = click.option(
    "--state", default=None, metavar="DIR", help="The daemon's folder. [default: the usual one]"
)


@click.group("token", epilog="Example: carpool token add ada --role user")
def command() -> None:
    """Make, list and remove tokens. A daemon that runs knows at once."""


def _tokens(state: str | None) -> AccessTokens:
    from carpool.service.config import read_settings
    from carpool.service.tokens import FILE, AccessTokens

    return AccessTokens(read_settings(os.environ, {"state": state}).state / FILE)


@command.command("add", epilog="Example: carpool token add ada --role user")
@click.argument("name")
@click.option(
    "--role",
    type=click.Choice(["admin", "user", "read-only"]),
    default="user",
    show_default=True,
    help="admin: everything; user: their own jobs; read-only: sees everything, touches nothing.",
)
@state_option
@json_option
def add(name: str, role: str, state: str | None, as_json: bool) -> None:
    """Make a token for NAME and print it. It is kept as a hash only, so this is the one time that it is shown."""
    from carpool.service.people import Person, Role

    text = _tokens(state).add(Person(name, Role(role)), time.time())
    if as_json:
        print_json({"person": name, "role": role, "token": text})
    else:
        click.echo(text)


@command.command("list", epilog="Example: carpool token list")
@state_option
@json_option
def list_(state: str | None, as_json: bool) -> None:
    """Print who has tokens; never the tokens."""
    from carpool.cli.job_rows import as_columns

    found = _tokens(state).all()
    if as_json:
        rows = [{"id": t.id, "person": t.person.name, "role": t.person.role, "made_at": t.made_at} for t in found]
        print_json({"tokens": rows})
    elif found:
        made = [time.strftime("%Y-%m-%d %H:%M", time.localtime(t.made_at)) for t in found]
        rows_ = [(t.id, t.person.name, str(t.person.role), at) for t, at in zip(found, made, strict=True)]
        for line in as_columns(("id", "person", "role", "made"), rows_):
            click.echo(line)
    else:
        click.echo("no tokens")


@command.command("remove", epilog="Example: carpool token remove ada-1")
@click.argument("token_id", metavar="ID")
@state_option
def remove(token_id: str, state: str | None) -> None:
    """Let a token be one no longer; ID is what `carpool token list` shows."""
    _tokens(state).remove(token_id)
    click.echo(f"{token_id} is removed")
