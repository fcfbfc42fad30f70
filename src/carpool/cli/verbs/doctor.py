"""``carpool doctor``: check what this machine supports, and how to fix what is missing."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from carpool import __version__
from carpool.cli.support.json_output import json_option

_EPILOG = """\b
Examples:
  carpool doctor
  carpool doctor --json
"""


@click.command("doctor", epilog=_EPILOG)
@json_option
def doctor(as_json: bool) -> None:
    """Try what trainings need on this machine: yes or no for each, with what was found and the way out.

    Everything but the cores can be missing: jobs then run more slowly, or on fewer kinds of machines.
    """
    from carpool.runtime.doctor import examine

    findings = []
    for finding in examine():
        findings.append(finding)
        if as_json:
            continue
        click.echo(f"{'yes' if finding.is_there else 'no':<4}{finding.name:<15}{finding.found}")
        if not finding.is_there and finding.way_out:
            click.echo(f"{'':<19}{finding.way_out}")
    if as_json:
        checks = [asdict(finding) for finding in findings]
        click.echo(json.dumps({"schema": 1, "version": __version__, "checks": checks}))
