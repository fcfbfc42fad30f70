"""``carpool ps`` and ``carpool top``: the daemon's jobs and devices, once or live."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from carpool.cli.render.job_rows import (
    FOREIGN_HEADINGS,
    HEADINGS,
    NODE_HEADINGS,
    age_column,
    as_columns,
    extra_columns,
    fold_sweeps,
    foreign_row,
    job_row,
    node_row,
    short,
)
from carpool.cli.support.daemon_client import connect, server_option
from carpool.cli.support.options import json_option, print_json

if TYPE_CHECKING:
    from rich.console import RenderableType

    from carpool.service.client import Client


_PS_EPILOG = """\b
Examples:
  carpool ps
  carpool ps --all --user ada
  carpool ps --json | jq -r '.jobs[] | select(.phase == "running").id'
"""
_ACTIVE_PHASES = ("blocked", "waiting", "running", "paused")


@click.command("ps", epilog=_PS_EPILOG)
@click.option("--all", "-a", "everything", is_flag=True, help="Include jobs that have ended.")
@click.option(
    "--phase",
    multiple=True,
    metavar="PHASE",
    help="List only jobs that are blocked, waiting, running, paused, finished, failed or cancelled. Repeatable.",
)
@click.option("--user", default="", metavar="NAME", help="List only this user's jobs.")
@click.option("--limit", default=100, show_default=True, type=click.IntRange(1, 1000), help="Jobs to list at most.")
@server_option
@json_option
def ps(everything: bool, phase: tuple[str, ...], user: str, limit: int, server: str, as_json: bool) -> None:
    """List the daemon's jobs, newest first, with phase, devices, progress and remaining time.

    Jobs of a sweep that are in the same phase share a line, such as mlp[3-9]; running jobs have a line each.

    Below the jobs: other processes that use the daemon's GPUs. The daemon schedules no job on such a GPU unless one
    already runs there.
    """
    _check_phases(phase)
    with connect(server) as client:
        phases = phase or (() if everything else _ACTIVE_PHASES)
        page = client.jobs(phase=list(phases), user=user, limit=limit)
        nodes = client.nodes()
    foreign = [each for node in nodes for each in node["outsiders"]]
    if as_json:
        print_json({"jobs": page["jobs"], "total": page["total"], "outsiders": foreign, "nodes": nodes})
        return
    if page["jobs"]:
        _print_jobs(page["jobs"])
    else:
        click.echo("no jobs" if everything or phase else "no active jobs; list ended jobs with: carpool ps --all")
    if page["total"] > len(page["jobs"]):
        click.echo(f"… and {page['total'] - len(page['jobs'])} more; raise --limit to list them")
    if len(nodes) > 1:
        click.echo("\nnodes:")
        for line in as_columns(NODE_HEADINGS, [node_row(each) for each in nodes]):
            click.echo(line)
    if foreign:
        click.echo("\nprocesses outside carpool:")
        for line in as_columns(FOREIGN_HEADINGS, [foreign_row(each) for each in foreign]):
            click.echo(line)


def _check_phases(phases: Sequence[str]) -> None:
    if not phases:
        return  # keeps the import out of a plain `carpool ps`
    from carpool.core.errors import UnknownName
    from carpool.core.model import Phase

    for phase in phases:
        if phase not in set(Phase):
            raise UnknownName("phase", phase, list(Phase), where="--phase")


def _print_jobs(listed: Sequence[Mapping[str, Any]]) -> None:
    jobs = fold_sweeps(listed)
    now = time.time()
    extra = {"age": age_column(jobs, now), **extra_columns(jobs, now)}
    rows = [(*job_row(job), *cells) for job, *cells in zip(jobs, *extra.values(), strict=True)]
    for line in as_columns((*HEADINGS, *extra), rows):
        click.echo(line)


_TOP_EPILOG = """\b
Examples:
  carpool top
  carpool top --every 5
  carpool top --json | jq .summary.held
"""
_PHASE_ORDER = ["running", "paused", "waiting", "blocked"]
_STYLES = {"running": "", "paused": "yellow", "waiting": "dim", "blocked": "dim"}


@click.command("top", epilog=_TOP_EPILOG)
@click.option("--every", default=1.0, show_default=True, type=click.FloatRange(0.2), help="Seconds between updates.")
@click.option("--once", is_flag=True, help="Print the current state and exit.")
@server_option
@json_option
def top(every: float, once: bool, server: str, as_json: bool) -> None:
    """Show nodes, the jobs on each device and every job's progress, updated until Ctrl-C.

    With --json, print the current state once.
    """
    with connect(server) as client:
        if as_json:
            print_json(_fetch(client))
            return
        from rich.console import Console
        from rich.live import Live

        if once:
            Console().print(draw(_fetch(client)))
            return
        screen = Live(draw(_fetch(client)), auto_refresh=False, screen=True)
        with contextlib.suppress(KeyboardInterrupt), screen as live:  # Ctrl-C ends the display
            while True:
                time.sleep(every)
                live.update(draw(_fetch(client)), refresh=True)


def _fetch(client: Client) -> dict[str, Any]:
    jobs = client.jobs(phase=_PHASE_ORDER, newest_first=False, limit=200)
    cluster = {"summary": client.summary(), "devices": client.devices(), "nodes": client.nodes()}
    return {**cluster, "jobs": jobs["jobs"], "active": jobs["total"]}


def draw(state: dict[str, Any]) -> RenderableType:
    """Render summary line, table of nodes where there are several, device table and job table."""
    from rich.console import Group
    from rich.text import Text

    summary = state["summary"]
    counts = ", ".join(f"{count} {phase}" for phase, count in summary["jobs"].items() if count)
    head = Text(f"carpool {summary['version']}  policy {summary['policy']}  {counts or 'no jobs'}", style="bold")
    more = state["active"] - len(state["jobs"])
    foot = [Text(f"… and {more} more", style="dim")] if more else []
    nodes = [_node_table(state["nodes"]), Text()] if len(state["nodes"]) > 1 else []
    return Group(head, Text(), *nodes, _device_table(state["devices"]), Text(), _job_table(state["jobs"]), *foot)


def _node_table(nodes: Sequence[Mapping[str, Any]]) -> RenderableType:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in NODE_HEADINGS:
        table.add_column(heading, no_wrap=True)
    for node in nodes:
        table.add_row(*node_row(node), style="red" if node["is_lost"] else "dim" if node["is_drained"] else "")
    return table


def _device_table(devices: Sequence[Mapping[str, Any]]) -> RenderableType:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("device", "node", "type", "allocated", "jobs"):
        table.add_column(heading, no_wrap=True)
    for device in devices:
        allocated = sum(each["fraction"] for each in device["residents"])
        users = [short(each["job"]) or "(another user's)" for each in device["residents"]]
        users += [f"(process {each['pid']} {each['user']})" for each in device["outsiders"]]
        style = "red" if device["is_lost"] else "" if allocated else "dim"
        use = "lost" if device["is_lost"] else _bar(allocated)
        table.add_row(device["name"], device["node"], device["kind"], use, ", ".join(users), style=style)
    return table


def _job_table(jobs: Sequence[Mapping[str, Any]]) -> RenderableType:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    ordered = sorted(jobs, key=lambda job: _PHASE_ORDER.index(job["phase"]))
    extra = extra_columns(ordered, time.time())
    for heading in (*HEADINGS, *extra):
        table.add_column(heading, no_wrap=True, justify="right" if heading in HEADINGS[4:] else "left")
    for job, *cells in zip(ordered, *extra.values(), strict=True):
        table.add_row(*job_row({**job, "id": short(job["id"])}), *cells, style=_STYLES[job["phase"]])
    return table


def _bar(fraction: float) -> str:
    full = round(10 * min(1.0, fraction))
    return "█" * full + "·" * (10 - full) + f" {fraction:4.0%}"
