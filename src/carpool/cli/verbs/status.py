"""``carpool ps`` and ``carpool top``: the daemon's jobs and devices, once or live."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

import click

from carpool.cli.render.job_rows import (
    HEADINGS,
    OUTSIDER_HEADINGS,
    as_columns,
    fold_sweeps,
    job_row,
    outsider_row,
    priority_columns,
    short,
)
from carpool.cli.support.daemon_client import connect, print_json, server_option
from carpool.cli.support.json_output import json_option

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
@click.option("--all", "-a", "everything", is_flag=True, help="Jobs that are over too.")
@click.option("--phase", multiple=True, metavar="PHASE", help="Only jobs in this phase; may be repeated.")
@click.option("--user", default="", help="Only this person's.")
@click.option("--limit", default=100, show_default=True, type=click.IntRange(1, 1000), help="How many, newest first.")
@server_option
@json_option
def ps(everything: bool, phase: tuple[str, ...], user: str, limit: int, server: str, as_json: bool) -> None:
    """List jobs: where each stands, what it holds and how far it is.

    Jobs of a sweep that stand alike share a line, such as mlp[3-9]; those that run have one each.

    Below them, processes that compute on the daemon's GPUs and are no jobs of it. A GPU that somebody else came to is
    left to them while no job is on it.
    """
    from carpool.core.errors import UnknownName
    from carpool.core.model import Phase

    for each in phase:
        if each not in set(Phase):
            raise UnknownName("phase", each, list(Phase), where="--phase")
    with connect(server) as client:
        phases = phase or (() if everything else _ACTIVE_PHASES)
        page = client.jobs(phase=list(phases), user=user, limit=limit)
        outsiders = [each for node in client.nodes() for each in node["outsiders"]]
    if as_json:
        print_json({"jobs": page["jobs"], "total": page["total"], "outsiders": outsiders})
        return
    if page["jobs"]:
        jobs = fold_sweeps(page["jobs"])
        more = priority_columns(jobs, time.time())
        rows = [(*job_row(job), *cells) for job, *cells in zip(jobs, *more.values(), strict=True)]
        for line in as_columns((*HEADINGS, *more), rows):
            click.echo(line)
    else:
        click.echo("no jobs" if everything or phase else "no jobs; those that are over: carpool ps --all")
    if page["total"] > len(page["jobs"]):
        click.echo(f"… and {page['total'] - len(page['jobs'])} more: --limit")
    if outsiders:
        click.echo("\nnot carpool's:")
        for line in as_columns(OUTSIDER_HEADINGS, [outsider_row(each) for each in outsiders]):
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
@click.option("--every", default=1.0, show_default=True, type=click.FloatRange(0.2), help="Seconds between two looks.")
@click.option("--once", is_flag=True, help="Look once and leave.")
@server_option
@json_option
def top(every: float, once: bool, server: str, as_json: bool) -> None:
    """Show who holds which device and how far every job is, until Ctrl-C. With --json: how it stands now."""
    with connect(server) as client:
        if as_json:
            print_json(_fetch(client))
            return
        from rich.console import Console
        from rich.live import Live

        if once:
            Console().print(draw(_fetch(client)))
            return
        first = Live(draw(_fetch(client)), auto_refresh=False, screen=True)
        with contextlib.suppress(KeyboardInterrupt), first as live:  # Ctrl-C is how one leaves
            while True:
                time.sleep(every)
                live.update(draw(_fetch(client)), refresh=True)


def _fetch(client: Client) -> dict[str, Any]:
    jobs = client.jobs(phase=_PHASE_ORDER, newest_first=False, limit=200)
    return {"summary": client.summary(), "devices": client.devices(), "jobs": jobs["jobs"], "active": jobs["total"]}


def draw(seen: dict[str, Any]) -> RenderableType:
    """The whole picture."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    summary = seen["summary"]
    counts = ", ".join(f"{count} {phase}" for phase, count in summary["jobs"].items() if count)
    head = Text(f"carpool {summary['version']}  policy {summary['policy']}  {counts or 'no jobs'}", style="bold")
    devices = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("device", "node", "kind", "held", "by"):
        devices.add_column(heading, no_wrap=True)
    for device in seen["devices"]:
        held = sum(each["fraction"] for each in device["residents"])
        by = ", ".join(
            [short(each["job"]) or "(somebody's)" for each in device["residents"]]
            + [f"(process {each['pid']} {each['user']})" for each in device["outsiders"]]
        )
        style = "red" if device["is_lost"] else "" if held else "dim"
        cells = (device["name"], device["node"], device["kind"], "lost" if device["is_lost"] else _bar(held), by)
        devices.add_row(*cells, style=style)
    jobs = Table(box=None, pad_edge=False, header_style="dim")
    for heading in HEADINGS:
        jobs.add_column(heading, no_wrap=True, justify="right" if heading in HEADINGS[4:] else "left")
    for job in sorted(seen["jobs"], key=lambda job: _PHASE_ORDER.index(job["phase"])):
        jobs.add_row(*job_row({**job, "id": short(job["id"])}), style=_STYLES[job["phase"]])
    more = seen["active"] - len(seen["jobs"])
    foot = [Text(f"… and {more} more", style="dim")] if more else []
    return Group(head, Text(), devices, Text(), jobs, *foot)


def _bar(held: float) -> str:
    full = round(10 * min(1.0, held))
    return "█" * full + "·" * (10 - full) + f" {held:4.0%}"
