"""``carpool results``: the jobs of a sweep or run side by side, best first."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from carpool.cli.support.daemon_client import connect, server_option
from carpool.cli.support.options import json_option, print_json
from carpool.core.errors import InputError, UnknownName, cause

if TYPE_CHECKING:
    from carpool.backends.run_folder import RunFolder

_EPILOG = """\b
Examples:
  carpool results
  carpool results rates --metric val_acc --max
  carpool results rates --csv > rates.csv
  carpool results --run jobs --html results.html
"""


@click.command("results", epilog=_EPILOG)
@click.argument("name", required=False, default="", metavar="[SWEEP|RUN]")
@click.option("--run", default="", metavar="RUN", help="Read this run, by name or folder.")
@click.option(
    "--metric",
    default="",
    metavar="NAME",
    help="Metric to order by. [default: that of halving, else one all jobs report]",
)
@click.option("--max", "mode", flag_value="max", help="More is better. [default: by the metric's name]")
@click.option("--min", "mode", flag_value="min", help="Less is better.")
@click.option("--csv", "as_csv", is_flag=True, help="Print comma-separated values.")
@click.option("--html", default="", metavar="FILE", help="Write table and curves of a run to this page.")
@server_option
@json_option
def results(
    name: str, run: str, metric: str, mode: str | None, as_csv: bool, html: str, server: str, as_json: bool
) -> None:
    """Compare the jobs of a sweep or run: hyper-parameters, state, steps, last and best value of a metric.

    SWEEP is a sweep of the daemon, or of a run in this folder; RUN is a run. Without a name: the newest run in this
    folder, else the daemon's newest sweep. The best job is marked with *.
    """
    from carpool.cli.render.results_table import results_csv, results_lines

    folder = None if server else _find_run(name, run)
    if folder is None:
        if html:
            raise InputError("--html needs a run", way_out="Open /results on the daemon's dashboard instead.")
        found = _from_daemon(server, name, metric, mode or "")
    else:
        found = _from_run(folder, "" if name == folder.path.name else name, metric, mode or "", html)
    if as_json:
        print_json(found)
    elif as_csv:
        click.echo(results_csv(found), nl=False)
    else:
        for line in results_lines(found):
            click.echo(line)


def _find_run(name: str, run: str) -> RunFolder | None:
    """The folder to read; None: ask the daemon."""
    from carpool.cli.support.run_lookup import all_runs, named_run

    if run:
        return named_run(run)
    runs = all_runs()
    if not name:
        return runs[-1] if runs else None
    if name in _daemon_sweeps():
        return None
    if any(folder.path.name == name for folder in runs) or Path(name).is_dir():
        return named_run(name)
    holders = [each for each in runs if any(spec.array == name for spec, _ in each.settings().jobs)]
    if holders:
        return holders[-1]
    sweeps = {spec.array for each in runs for spec, _ in each.settings().jobs if spec.array}
    raise UnknownName("sweep or run", name, {*sweeps, *(each.path.name for each in runs), *_daemon_sweeps()})


def _daemon_sweeps(server: str = "") -> list[str]:
    """Sweeps of the daemon, newest first; none if no daemon answers."""
    from carpool.service.client import Unreachable
    from carpool.service.config import read_settings

    settings = read_settings(os.environ)
    if not server and not settings["server"] and not settings.socket.is_socket():
        return []
    try:
        with connect(server) as client:
            return [sweep["name"] for sweep in client.sweeps()]
    except Unreachable:
        return []


def _from_daemon(server: str, name: str, metric: str, mode: str) -> dict[str, Any]:
    if not name:
        name = next(iter(_daemon_sweeps(server)), "")
    if not name:
        raise InputError(
            "there is no run in this folder, and no sweep of a daemon", way_out="Start one: carpool run jobs.toml."
        )
    with connect(server) as client:
        return client.results(name, metric, mode)


def _from_run(folder: RunFolder, sweep: str, metric: str, mode: str, html: str) -> dict[str, Any]:
    from carpool.service.queries.results import results_view, run_accounts

    accounts = run_accounts(folder)
    if sweep:
        known = {account.spec.array for account in accounts if account.spec.array}
        if sweep not in known:
            raise UnknownName("sweep", sweep, known, where=str(folder.path))
        accounts = [account for account in accounts if account.spec.array == sweep]
    at = max((account.as_of for account in accounts), default=0.0)
    view = results_view(sweep or folder.path.name, accounts, at, metric, mode)
    if html:
        try:
            from carpool.dashboard.results import results_page
        except ImportError as error:
            raise InputError(f"--html: {error}", way_out="Install the extra: pip install 'carpool[serve]'.") from None
        try:
            Path(html).write_text(results_page(view, folder), encoding="utf-8")
        except OSError as error:
            raise InputError(f"cannot write: {cause(error)}", where=html, way_out="Name another --html.") from None
    return asdict(view)
