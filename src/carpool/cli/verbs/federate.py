"""``carpool federate``: federated learning of several tasks on the devices of this machine."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from carpool import __version__
from carpool.cli.support.options import json_option, print_json, print_note

if TYPE_CHECKING:
    from carpool.backends.federation_store import FederationStore
    from carpool.federated.federation_file import FederationFile
    from carpool.runtime.process.forkserver import ForkServer

_EPILOG = """\b
Examples:
  carpool federate examples/federation.toml
  carpool federate examples/federation.toml --compare --json
  carpool federate examples/federation.toml --resume

\b
Exit codes: 0 all tasks done; 1 a task failed; 2 bad input; 130 interrupted and resumable.
"""
_BASELINE = "equal-steps"


@click.command("federate", epilog=_EPILOG)
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
@click.option(
    "--out",
    default=None,
    type=click.Path(path_type=Path),
    help="Folder of the run. [default: .carpool/federations/NAME]",
)
@click.option("--resume", is_flag=True, help="Continue the run in the folder.")
@click.option(
    "--compare", is_flag=True, help=f"Run it again with plan = '{_BASELINE}' (equal shares, fixed batch) and compare."
)
@json_option
def federate(file: Path, out: Path | None, resume: bool, compare: bool, as_json: bool) -> int:
    """Train the tasks of FILE together: each device works on its part of every task's data.

    In a cycle every task makes one round: devices get its weights, train, and return updates, which are checked and
    averaged. Devices are processes of this machine; they stay ready between rounds. FILE is TOML with [[task]] and
    [[device]] tables. The weights of each task are in the run's folder, NAME.npz.
    """
    from carpool.backends.federation_store import FederationStore
    from carpool.cli.render.federation_table import print_federation
    from carpool.federated.federation_file import read_federation

    parsed = read_federation(file)
    folder = out or Path(".carpool") / "federations" / file.stem
    plans = [parsed.federation.plan, *([_BASELINE] if compare and parsed.federation.plan != _BASELINE else [])]
    stores = {plan: FederationStore(folder if plan == plans[0] else folder / plan) for plan in plans}
    for store in stores.values():  # before torch is imported
        store.read() if resume else store.check_new()
    results = asyncio.run(_run_all(parsed, stores, resume=resume, quiet=as_json))
    if as_json:
        print_json({"version": __version__, "file": str(file), "folder": str(folder), "results": results})
    else:
        print_federation(results)
        click.echo(f"weights and journal: {folder}")
    return int(any(task["failed"] for result in results for task in result["tasks"]))


async def _run_all(
    file: FederationFile, stores: Mapping[str, FederationStore], *, resume: bool, quiet: bool
) -> list[dict[str, Any]]:
    """Run the federation under each plan, in a folder of its own."""
    from carpool.backends.federation_run import fork_server

    async with fork_server() as forks:
        return [await _run(file, plan, store, forks, resume=resume, quiet=quiet) for plan, store in stores.items()]


async def _run(
    file: FederationFile, plan: str, store: FederationStore, forks: ForkServer, *, resume: bool, quiet: bool
) -> dict[str, Any]:
    from carpool.backends.federation_run import FederationRun
    from carpool.cli.render.federation_table import live_federation
    from carpool.federated.figures import FederationFigures

    file = replace(file, federation=replace(file.federation, plan=plan))
    store.folder.mkdir(parents=True, exist_ok=True)
    figures = FederationFigures(file.federation)
    with live_federation(file, figures, quiet=quiet) as show:
        run = FederationRun(file, store, [figures, show], resume=resume)
        tasks = await run.run(forks)
    for outcome, count in sorted(figures.outcomes.items()):
        if outcome != "accepted":
            print_note(f"{count} updates were refused: {outcome}")
    return {
        "plan": plan,
        "cycles": len(figures.cycles),
        "seconds": sum(each.seconds for each in figures.cycles),
        "emulated": file.is_emulated,
        "samples": sum(each.samples for each in figures.cycles),
        "idle_s": figures.idle_s,
        "idle_part": figures.idle_part,
        "mismatch": figures.mean_mismatch,
        "bytes": sum(each.num_bytes for each in figures.cycles),
        "outcomes": dict(figures.outcomes),
        "tasks": [
            {
                "name": name,
                "rounds": task.rounds,
                "reason": task.reason,
                "failed": task.failed,
                "digest": task.digest,
                "metrics": task.metrics[-1][1] if task.metrics else {},
                "history": [{"round": done, **metrics} for done, metrics in task.metrics],
            }
            for name, task in tasks.items()
        ],
    }
