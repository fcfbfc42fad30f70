"""``carpool top``: devices and jobs of the daemon, live."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

import click

from carpool.cli.asking import connect, print_json, server_option
from carpool.cli.flags import json_option
from carpool.cli.job_rows import HEADINGS, job_row, short

if TYPE_CHECKING:
    from rich.console import RenderableType

    from carpool.service.client import Client

_EPILOG = """\b
Examples:
  carpool top
  carpool top --every 5
  carpool top --json | jq .summary.held
"""
_ACTIVE = ["running", "paused", "waiting", "blocked"]
_STYLES = {"running": "", "paused": "yellow", "waiting": "dim", "blocked": "dim"}


@click.command("top", epilog=_EPILOG)
@click.option("--every", default=1.0, show_default=True, type=click.FloatRange(0.2), help="Seconds between two looks.")
@click.option("--once", is_flag=True, help="Look once and leave.")
@server_option
@json_option
def command(every: float, once: bool, server: str, as_json: bool) -> None:
    """Show who holds which device and how far every job is, until Ctrl-C. With --json: how it stands now."""
    with connect(server) as client:
        if as_json:
            print_json(_look(client))
            return
        from rich.console import Console
        from rich.live import Live

        if once:
            Console().print(draw(_look(client)))
            return
        first = Live(draw(_look(client)), auto_refresh=False, screen=True)
        with contextlib.suppress(KeyboardInterrupt), first as live:  # Ctrl-C is how one leaves
            while True:
                time.sleep(every)
                live.update(draw(_look(client)), refresh=True)


def _look(client: Client) -> dict[str, Any]:
    jobs = client.jobs(phase=_ACTIVE, newest_first=False, limit=200)
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
    for job in sorted(seen["jobs"], key=lambda job: _ACTIVE.index(job["phase"])):
        jobs.add_row(*job_row({**job, "id": short(job["id"])}), style=_STYLES[job["phase"]])
    more = seen["active"] - len(seen["jobs"])
    foot = [Text(f"… and {more} more", style="dim")] if more else []
    return Group(head, Text(), devices, Text(), jobs, *foot)


def _bar(held: float) -> str:
    full = round(10 * min(1.0, held))
    return "█" * full + "·" * (10 - full) + f" {held:4.0%}"
