"""``carpool doctor``: check what this machine supports, and how to fix what is missing."""

from __future__ import annotations

from dataclasses import asdict

import click

from carpool import __version__
from carpool.cli.support.options import json_option, print_json

_EPILOG = """\b
Examples:
  carpool doctor
  carpool doctor --json
"""


@click.command("doctor", epilog=_EPILOG)
@json_option
def doctor(as_json: bool) -> None:
    """Check what this machine supports: GPUs, CUDA graphs, MPS, NCCL, shared memory and optional packages.

    Each check prints yes or no with what was found; a no says how to fix it. Jobs run without most of these, but more
    slowly or on CPU only.
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
        print_json({"version": __version__, "checks": [asdict(finding) for finding in findings]})
