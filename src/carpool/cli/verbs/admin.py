"""``carpool config``, ``token``, ``backup`` and ``restore``: administer the daemon."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from carpool import __version__
from carpool.cli.support.daemon_client import print_json
from carpool.cli.support.json_output import json_option

if TYPE_CHECKING:
    from carpool.service.auth import AccessTokens


@click.group("config", epilog="Example: carpool config show")
def config() -> None:
    """Look at the settings of the daemon and of those who ask it."""


@config.command("show", epilog="Example: CARPOOL_PORT=8000 carpool config show")
@json_option
def config_show(as_json: bool) -> None:
    """Print every setting, its value and where that came from.

    What is said later wins: the default, the file (~/.config/carpool/config.toml, or what CARPOOL_CONFIG names), a
    variable CARPOOL_NAME, a flag.
    """
    from carpool.cli.render.job_rows import as_columns
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


state_option = click.option(
    "--state", default=None, metavar="DIR", help="The daemon's folder. [default: the usual one]"
)


@click.group("token", epilog="Example: carpool token add ada --role user")
def token() -> None:
    """Make, list and remove tokens. A daemon that runs knows at once."""


def _open_tokens(state: str | None) -> AccessTokens:
    from carpool.service.auth import TOKEN_FILE, AccessTokens
    from carpool.service.config import read_settings

    return AccessTokens(read_settings(os.environ, {"state": state}).state / TOKEN_FILE)


@token.command("add", epilog="Example: carpool token add ada --role user")
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
def token_add(name: str, role: str, state: str | None, as_json: bool) -> None:
    """Make a token for NAME and print it. It is kept as a hash only, so this is the one time that it is shown."""
    from carpool.service.auth import Principal, Role

    text = _open_tokens(state).add(Principal(name, Role(role)), time.time())
    if as_json:
        print_json({"person": name, "role": role, "token": text})
    else:
        click.echo(text)


@token.command("list", epilog="Example: carpool token list")
@state_option
@json_option
def token_list(state: str | None, as_json: bool) -> None:
    """Print who has tokens; never the tokens."""
    from carpool.cli.render.job_rows import as_columns

    found = _open_tokens(state).all()
    if as_json:
        rows = [{"id": t.id, "person": t.principal.name, "role": t.principal.role, "made_at": t.made_at} for t in found]
        print_json({"tokens": rows})
    elif found:
        made = [time.strftime("%Y-%m-%d %H:%M", time.localtime(t.made_at)) for t in found]
        rows_ = [(t.id, t.principal.name, str(t.principal.role), at) for t, at in zip(found, made, strict=True)]
        for line in as_columns(("id", "person", "role", "made"), rows_):
            click.echo(line)
    else:
        click.echo("no tokens")


@token.command("remove", epilog="Example: carpool token remove ada-1")
@click.argument("token_id", metavar="ID")
@state_option
def token_remove(token_id: str, state: str | None) -> None:
    """Let a token be one no longer; ID is what `carpool token list` shows."""
    _open_tokens(state).remove(token_id)
    click.echo(f"{token_id} is removed")


@click.command("backup", epilog="Example: carpool backup carpool-monday.tar")
@click.argument("target", metavar="FILE")
@click.option("--state", metavar="DIR", help="The daemon's folder. [default: as it is set, see carpool config show]")
@click.option("--without-checkpoints", is_flag=True, help="Leave them out: jobs that are not over begin anew.")
@json_option
def backup(target: str, state: str | None, without_checkpoints: bool, as_json: bool) -> None:
    """Write the journal, logs, figures and checkpoints of a daemon into FILE.

    The daemon may go on meanwhile. FILE is written whole or not at all, for nobody else to read: what jobs were given
    is in it, variables with secrets too. Tokens are in it as hashes.
    """
    from carpool.service.config import read_settings
    from carpool.service.store.backup import take_backup

    folder = read_settings(os.environ, {"state": state}).state
    taken = take_backup(folder, Path(target), version=__version__, checkpoints=not without_checkpoints)
    if as_json:
        figures = {"file": target, "files": len(taken.files), "bytes": taken.bytes, "vanished": list(taken.vanished)}
        click.echo(json.dumps({"schema": 1, **figures}))
        return
    click.echo(f"{target}: {len(taken.files)} files, {taken.bytes / 1e6:.1f} MB of {folder}")
    if taken.vanished:
        click.echo(
            f"carpool: {len(taken.vanished)} files went away meanwhile: {', '.join(taken.vanished[:5])}", err=True
        )


@click.command("restore", epilog="Example: carpool restore carpool-monday.tar --state /var/lib/carpool")
@click.argument("source", metavar="FILE")
@click.option("--state", metavar="DIR", help="Where to. [default: the daemon's folder, see carpool config show]")
@click.option("--check", is_flag=True, help="Only read FILE through and say whether it is whole.")
@json_option
def restore(source: str, state: str | None, check: bool, as_json: bool) -> None:
    """Put what `carpool backup` wrote to FILE in place of an empty folder; a damaged FILE changes nothing.

    Start `carpool serve` afterwards: its jobs go on from the checkpoints in the backup.
    """
    from carpool.service.config import read_settings
    from carpool.service.store.backup import check_backup, restore_backup

    folder = read_settings(os.environ, {"state": state}).state
    found = check_backup(Path(source)) if check else restore_backup(Path(source), folder)
    if as_json:
        figures = {"file": source, "files": len(found.files), "bytes": found.bytes, "taken_at": found.taken_at}
        click.echo(json.dumps({"schema": 1, **figures, "state": None if check else str(folder)}))
        return
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found.taken_at))
    done = "is whole" if check else f"is in place in {folder}"
    click.echo(f"{source}: {len(found.files)} files of {when} ({found.bytes / 1e6:.1f} MB), {done}")
