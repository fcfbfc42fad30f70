"""``carpool restore``: put a backup of a daemon's state in place."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import click

from carpool.cli.flags import json_option


@click.command("restore", epilog="Example: carpool restore carpool-monday.tar --state /var/lib/carpool")
@click.argument("source", metavar="FILE")
@click.option("--state", metavar="DIR", help="Where to. [default: the daemon's folder, see carpool config show]")
@click.option("--check", is_flag=True, help="Only read FILE through and say whether it is whole.")
@json_option
def command(source: str, state: str | None, check: bool, as_json: bool) -> None:
    """Put what `carpool backup` wrote to FILE in place of an empty folder; a damaged FILE changes nothing.

    Start `carpool serve` afterwards: its jobs go on from the checkpoints in the backup.
    """
    from carpool.service.backup import check_backup, restore_backup
    from carpool.service.config import read_settings

    folder = read_settings(os.environ, {"state": state}).state
    found = check_backup(Path(source)) if check else restore_backup(Path(source), folder)
    if as_json:
        figures = {"file": source, "files": len(found.files), "bytes": found.bytes, "taken_at": found.taken_at}
        click.echo(json.dumps({"schema": 1, **figures, "state": None if check else str(folder)}))
        return
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found.taken_at))
    done = "is whole" if check else f"is in place in {folder}"
    click.echo(f"{source}: {len(found.files)} files of {when} ({found.bytes / 1e6:.1f} MB), {done}")
