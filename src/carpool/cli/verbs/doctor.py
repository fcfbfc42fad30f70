"""``carpool doctor``: check what this machine supports, and how to fix what is missing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from carpool import __version__
from carpool.cli.support.fleet import EngineChoice, check_engine_options, engine_hosts, engine_options
from carpool.cli.support.options import json_option, print_json

if TYPE_CHECKING:
    from carpool.runtime.doctor import Finding
    from carpool.service.fleet.remote_access import HostFinding

_EPILOG = """\b
Examples:
  carpool doctor
  carpool doctor --json
  carpool doctor --engine hosts --hosts lab.toml
  carpool doctor --engine ray
"""


@click.command("doctor", epilog=_EPILOG)
@engine_options
@json_option
def doctor(engine: str, hosts_file: str, ray_address: str, ray_idle: float, max_code: str, as_json: bool) -> None:
    """Check what this machine supports: GPUs, CUDA graphs, MPS, NCCL, shared memory and optional packages.

    Each check prints yes or no with its finding; a no says how to fix it. Jobs run without most of these, but more
    slowly or on CPU only.

    With --engine hosts, ray or slurm it compares Python, torch, carpool and drivers of all machines instead.
    """
    choice = EngineChoice(engine, hosts_file, ray_address, ray_idle, max_code)
    check_engine_options(choice)
    if engine in ("hosts", "slurm"):
        _compare_hosts(choice, as_json=as_json)
        return
    if engine == "ray":
        _compare_nodes(ray_address, as_json=as_json)
        return
    from carpool.runtime.doctor import examine

    findings: list[Finding] = []
    for finding in examine():
        is_said = bool(findings) and findings[-1].way_out == finding.way_out
        findings.append(finding)
        if as_json:
            continue
        click.echo(f"{'yes' if finding.is_there else 'no':<4}{finding.name:<15}{finding.found}")
        if not finding.is_there and finding.way_out and not is_said:
            click.echo(f"{'':<19}{finding.way_out}")
    if as_json:
        print_json({"version": __version__, "checks": [asdict(finding) for finding in findings]})


def _compare_hosts(choice: EngineChoice, *, as_json: bool) -> None:
    """Print one line per host: its versions and devices, or why it cannot be used."""
    import asyncio
    from pathlib import Path

    from carpool.service.fleet.remote_access import examine_hosts

    found = engine_hosts(choice, Path(".carpool") / "doctor")
    _print_hosts(asyncio.run(examine_hosts(found)), as_json=as_json)


def _compare_nodes(ray_address: str, *, as_json: bool) -> None:
    """Print one line per Ray node."""
    import asyncio
    import tempfile
    from pathlib import Path

    from carpool.backends.engines.ray_engine import RayEngine
    from carpool.service.fleet.engine_members import examine_engine

    with tempfile.TemporaryDirectory() as state:
        engine = RayEngine(Path(state), ray_address)
        try:
            _print_hosts(asyncio.run(examine_engine(engine)), as_json=as_json)
        finally:
            engine.close(keep=lambda name: True)


def _print_hosts(findings: Sequence[HostFinding], *, as_json: bool) -> None:
    if as_json:
        print_json({"version": __version__, "hosts": [asdict(finding) for finding in findings]})
        return
    for finding in findings:
        click.echo(f"{'yes' if finding.is_there else 'no':<4}{finding.name:<15}{finding.found}")
