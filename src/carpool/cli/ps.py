"""``carpool ps``: the jobs of the daemon, in a table."""

from __future__ import annotations

import time

import click

from carpool.cli.asking import connect, print_json, server_option
from carpool.cli.flags import json_option
from carpool.cli.job_rows import HEADINGS, OUTSIDER_HEADINGS, as_columns, folded, job_row, outsider_row, ranks

_EPILOG = """\b
Examples:
  carpool ps
  carpool ps --all --user ada
  carpool ps --json | jq -r '.jobs[] | select(.phase == "running").id'
"""
_ACTIVE = ("blocked", "waiting", "running", "paused")


@click.command("ps", epilog=_EPILOG)
@click.option("--all", "-a", "everything", is_flag=True, help="Jobs that are over too.")
@click.option("--phase", multiple=True, metavar="PHASE", help="Only jobs in this phase; may be repeated.")
@click.option("--user", default="", help="Only this person's.")
@click.option("--limit", default=100, show_default=True, type=click.IntRange(1, 1000), help="How many, newest first.")
@server_option
@json_option
def command(everything: bool, phase: tuple[str, ...], user: str, limit: int, server: str, as_json: bool) -> None:
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
        phases = phase or (() if everything else _ACTIVE)
        page = client.jobs(phase=list(phases), user=user, limit=limit)
        outsiders = [each for node in client.nodes() for each in node["outsiders"]]
    if as_json:
        print_json({"jobs": page["jobs"], "total": page["total"], "outsiders": outsiders})
        return
    if page["jobs"]:
        jobs = folded(page["jobs"])
        more = ranks(jobs, time.time())
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
