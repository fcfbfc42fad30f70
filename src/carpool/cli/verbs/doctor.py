"""``carpool doctor``: check what this machine supports, and how to fix what is missing."""

from __future__ import annotations

from dataclasses import asdict

import click

from carpool import __version__
from carpool.cli.support.fleet import engine_hosts, engine_options
from carpool.cli.support.options import json_option, print_json

_EPILOG = """\b
Examples:
  carpool doctor
  carpool doctor --json
  carpool doctor --engine hosts --hosts lab.toml
"""


@click.command("doctor", epilog=_EPILOG)
@engine_options
@json_option
def doctor(engine: str, hosts_file: str, as_json: bool) -> None:
    """Check what this machine supports: GPUs, CUDA graphs, MPS, NCCL, shared memory and optional packages.

    Each check prints yes or no with what was found; a no says how to fix it. Jobs run without most of these, but more
    slowly or on CPU only.

    With --engine hosts or slurm it compares Python, torch, carpool and drivers of all machines instead.
    """
    if engine != "local":
        _compare_hosts(engine, hosts_file, as_json=as_json)
        return
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


def _compare_hosts(engine: str, hosts_file: str, *, as_json: bool) -> None:
    """Print one line per host: what it has, or why it cannot be used."""
    import asyncio
    from pathlib import Path

    from carpool.service.daemon.remote_access import examine_hosts

    findings = asyncio.run(examine_hosts(engine_hosts(engine, hosts_file, Path(".carpool") / "doctor")))
    if as_json:
        print_json({"version": __version__, "hosts": [asdict(finding) for finding in findings]})
        return
    for finding in findings:
        click.echo(f"{'yes' if finding.is_there else 'no':<4}{finding.name:<15}{finding.found}")
