"""``carpool backup``: a daemon's state as one file, taken while it runs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click

from carpool import __version__
from carpool.cli.flags import json_option


@click.command("backup", epilog="Example: carpool backup carpool-monday.tar")
@click.argument("target", metavar="FILE")
@click.option("--state", metavar="DIR", help="The daemon's folder. [default: as it is set, see carpool config show]")
@click.option("--without-checkpoints", is_flag=True, help="Leave them out: jobs that are not over begin anew.")
@json_option
def command(target: str, state: str | None, without_checkpoints: bool, as_json: bool) -> None:
    """Write the journal, logs, figures and checkpoints of a daemon into FILE.

    The daemon may go on meanwhile. FILE is written whole or not at all, for nobody else to read: what jobs were given
    is in it, variables with secrets too. Tokens are in it as hashes.
    """
    from carpool.service.backup import take_backup
    from carpool.service.config import read_settings

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
