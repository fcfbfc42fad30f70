"""``carpool config``, ``token``, ``backup``, ``restore``, ``stop``, ``drain``, ``undrain``, ``completion``."""

from __future__ import annotations

import fcntl
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from carpool import __version__
from carpool.cli.support.daemon_client import connect, server_option
from carpool.cli.support.options import json_option, print_json, print_note
from carpool.core.errors import InputError

if TYPE_CHECKING:
    from carpool.service.auth import AccessTokens


@click.group("config", epilog="Example: carpool config show")
def config() -> None:
    """Show the settings of the daemon and of the commands that talk to it."""


@config.command("show", epilog="Example: CARPOOL_PORT=8000 carpool config show")
@json_option
def config_show(as_json: bool) -> None:
    """Print every setting, its value and where the value comes from.

    Later sources override earlier ones: built-in default, configuration file (~/.config/carpool/config.toml, or the
    file named by CARPOOL_CONFIG), environment variable CARPOOL_<SETTING>, command-line option.
    """
    from carpool.cli.render.job_rows import as_columns
    from carpool.service.config import SETTINGS, config_file, read_settings

    settings = read_settings(os.environ)
    rows = []
    for setting in SETTINGS.values():
        value = settings[setting.name]
        value = ",".join(value) if isinstance(value, tuple) else "…" if setting.is_secret and value else value
        rows.append((setting.name, value, settings.origins[setting.name], setting.about))
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
    "--state",
    default=None,
    metavar="DIR",
    help="The daemon's state folder. [default: the setting 'state', see carpool config show]",
)


_STOP_EPILOG = """\b
Examples:
  carpool stop
  carpool stop --leave-running
"""


@click.command("stop", epilog=_STOP_EPILOG)
@state_option
@click.option("--leave-running", is_flag=True, help="Leave jobs running for the next daemon.")
def stop(state: str | None, leave_running: bool) -> None:
    """Stop the daemon of a state folder; returns when it has exited.

    Its jobs are stopped at the end of a step with a checkpoint, and the next `carpool serve` resumes them.
    """
    path = _state_folder(state) / "lock"
    try:
        lock = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        raise _no_daemon(path.parent) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        raise _no_daemon(path.parent)
    except BlockingIOError:
        pid = os.pread(lock, 20, 0).strip()
        if not pid.isdigit():
            raise InputError("the daemon has left no process id", where=str(path), way_out="Use kill PID.") from None
        os.kill(int(pid), signal.SIGUSR1 if leave_running else signal.SIGTERM)
        fcntl.flock(lock, fcntl.LOCK_SH)  # held by the daemon until it exits
    finally:
        os.close(lock)
    click.echo("stopped; its jobs keep running" if leave_running else "stopped; carpool serve resumes its jobs")


def _no_daemon(state: Path) -> InputError:
    return InputError("no daemon uses this folder", where=str(state), way_out="Name its folder with --state.")


@click.group("token", epilog="Example: carpool token add ada --role user")
def token() -> None:
    """Create, list and revoke access tokens. A running daemon applies changes at once."""


def _open_tokens(state: str | None) -> AccessTokens:
    from carpool.service.auth import TOKEN_FILE, AccessTokens

    return AccessTokens(_state_folder(state) / TOKEN_FILE)


def _state_folder(state: str | None) -> Path:
    from carpool.service.config import read_settings

    return read_settings(os.environ, {"state": state}).state


@token.command("add", epilog="Example: carpool token add ada --role user")
@click.argument("name")
@click.option(
    "--role",
    type=click.Choice(["admin", "user", "read-only"]),
    default="user",
    show_default=True,
    help="admin: may do everything; user: submits jobs and controls their own; read-only: may change nothing.",
)
@state_option
@json_option
def token_add(name: str, role: str, state: str | None, as_json: bool) -> None:
    """Create a token for NAME and print it. Only its hash is stored: the token cannot be shown again."""
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
    """List the tokens by ID, with user, role and creation time. The tokens themselves are not stored."""
    from carpool.cli.render.job_rows import as_columns

    found = _open_tokens(state).all()
    if as_json:
        rows = [{"id": t.id, "person": t.principal.name, "role": t.principal.role, "made_at": t.made_at} for t in found]
        print_json({"tokens": rows})
    elif found:
        created = [time.strftime("%Y-%m-%d %H:%M", time.localtime(t.made_at)) for t in found]
        cells = [(t.id, t.principal.name, str(t.principal.role), at) for t, at in zip(found, created, strict=True)]
        for line in as_columns(("id", "user", "role", "created"), cells):
            click.echo(line)
    else:
        click.echo("no tokens")


@token.command("remove", epilog="Example: carpool token remove ada-1")
@click.argument("token_id", metavar="ID")
@state_option
def token_remove(token_id: str, state: str | None) -> None:
    """Revoke the token ID, as listed by `carpool token list`."""
    _open_tokens(state).remove(token_id)
    click.echo(f"{token_id} revoked")


@click.command("backup", epilog="Example: carpool backup carpool-monday.tar")
@click.argument("target", metavar="FILE")
@state_option
@click.option("--without-checkpoints", is_flag=True, help="Leave checkpoints out: restored jobs restart from step 0.")
@json_option
def backup(target: str, state: str | None, without_checkpoints: bool, as_json: bool) -> None:
    """Write the daemon's journal, logs, metrics and checkpoints to FILE.

    The daemon may run meanwhile. FILE appears complete or not at all, readable only by you: it contains the jobs'
    environment variables, secrets included. Tokens are stored as hashes.
    """
    from carpool.service.store.backup import take_backup

    folder = _state_folder(state)
    taken = take_backup(folder, Path(target), version=__version__, checkpoints=not without_checkpoints)
    if as_json:
        counts = {"files": len(taken.files), "bytes": taken.bytes}
        print_json({"file": target, **counts, "vanished": list(taken.vanished)})
        return
    click.echo(f"{target}: {len(taken.files)} files, {taken.bytes / 1e6:.1f} MB from {folder}")
    if taken.vanished:
        print_note(f"{len(taken.vanished)} files were deleted during the backup: {', '.join(taken.vanished[:5])}")


@click.command("restore", epilog="Example: carpool restore carpool-monday.tar --state /var/lib/carpool")
@click.argument("source", metavar="FILE")
@state_option
@click.option("--check", is_flag=True, help="Only verify the checksums in FILE.")
@json_option
def restore(source: str, state: str | None, check: bool, as_json: bool) -> None:
    """Restore a backup from FILE into an empty state folder. A damaged FILE changes nothing.

    Start `carpool serve` afterwards: unfinished jobs continue from the checkpoints in the backup.
    """
    from carpool.service.store.backup import check_backup, restore_backup

    folder = _state_folder(state)
    found = check_backup(Path(source)) if check else restore_backup(Path(source), folder)
    if as_json:
        counts = {"files": len(found.files), "bytes": found.bytes, "taken_at": found.taken_at}
        print_json({"file": source, **counts, "state": None if check else str(folder)})
        return
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found.taken_at))
    done = "all checksums match" if check else f"restored to {folder}"
    click.echo(f"{source}: {len(found.files)} files from {when} ({found.bytes / 1e6:.1f} MB), {done}")


def _node_command(verb: str, summary: str) -> click.Command:
    @click.command(verb, help=summary, epilog=f"Example: carpool {verb} box1")
    @click.argument("node")
    @server_option
    @json_option
    def command(node: str, server: str, as_json: bool) -> None:
        from carpool.cli.render.job_rows import NODE_HEADINGS, as_columns, node_row

        with connect(server) as client:
            nodes = client.drain(node) if verb == "drain" else client.undrain(node)
        if as_json:
            print_json({"nodes": nodes})
            return
        for line in as_columns(NODE_HEADINGS, [node_row(each) for each in nodes]):
            click.echo(line)

    return command


drain = _node_command(
    "drain",
    "Release all jobs of NODE, which continue elsewhere, and schedule none on it until carpool undrain NODE.",
)
undrain = _node_command("undrain", "Schedule jobs on NODE again after carpool drain NODE.")


_COMPLETION_EPILOG = """\b
Examples:
  carpool completion bash >> ~/.bashrc
  carpool completion zsh >> ~/.zshrc
  carpool completion fish > ~/.config/fish/completions/carpool.fish
"""


@click.command("completion", epilog=_COMPLETION_EPILOG)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script that makes a shell complete carpool's commands, options and job names."""
    from click.shell_completion import get_completion_class

    from carpool.cli.main import carpool

    kind = get_completion_class(shell)
    assert kind is not None, "click supports these shells"
    click.echo(kind(carpool, {}, "carpool", "_CARPOOL_COMPLETE").source())
