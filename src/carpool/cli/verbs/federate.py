"""``carpool federate``: federated learning of several tasks, on devices of this machine or over Flower."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from carpool import __version__
from carpool.cli.support.options import json_option, print_json, print_note
from carpool.core.errors import InputError

if TYPE_CHECKING:
    from carpool.backends.federation_devices import Devices
    from carpool.backends.federation_store import FederationStore
    from carpool.backends.flower.processes import Security
    from carpool.federated.federation_file import FederationFile
    from carpool.runtime.process.forkserver import ForkServer

_EPILOG = """\b
Examples:
  carpool federate examples/federation.toml
  carpool federate examples/federation.toml --compare --json
  carpool federate examples/federation.toml --resume
  carpool federate examples/federation.toml --transport flower
  carpool federate federation.toml --device laptop --superlink 10.0.0.5:8000 --root-certificates ca.crt

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
@click.option(
    "--transport",
    type=click.Choice(["embedded", "flower"]),
    default=None,
    help="How devices are reached: processes of this machine, or Flower SuperNodes. [default: embedded]",
)
@click.option(
    "--superlink",
    metavar="ADDRESS",
    default="",
    help="A running SuperLink, HOST:PORT. [default: one is started, and a SuperNode per device]",
)
@click.option(
    "--device", "device_name", metavar="NAME", default="", help="Run this device of FILE here, as a SuperNode."
)
@click.option("--root-certificates", default="", metavar="FILE", help="CA that signed the SuperLink's certificate.")
@click.option("--node-key", default="", metavar="FILE", help="Private key that authenticates the SuperNode.")
@click.option("--insecure", is_flag=True, help="Connect without TLS; only to a SuperLink on this machine.")
@json_option
def federate(
    file: Path,
    out: Path | None,
    resume: bool,
    compare: bool,
    transport: str | None,
    superlink: str,
    device_name: str,
    root_certificates: str,
    node_key: str,
    insecure: bool,
    as_json: bool,
) -> int:
    """Train the tasks of FILE together: each device works on its part of every task's data.

    In a cycle every task makes one round: devices get its weights, train, and return updates, which are checked and
    averaged. Devices are processes of this machine or, over Flower, of others; they stay ready between rounds. FILE is
    TOML with [[task]] and [[device]] tables. The weights of each task are in the run's folder, NAME.npz.
    """
    from carpool.backends.federation_store import FederationStore
    from carpool.cli.render.federation_table import print_federation
    from carpool.federated.federation_file import read_federation

    parsed = read_federation(file)
    folder = out or Path(".carpool") / "federations" / file.stem
    over = _Transport(
        transport == "flower" or bool(superlink or device_name), superlink, root_certificates, node_key, insecure
    )
    if over.is_flower:
        over.check(parsed, device_name)
    if device_name:
        (folder / "devices").mkdir(parents=True, exist_ok=True)
        return asyncio.run(_be_device(parsed, device_name, folder / "devices", over))
    if over.is_flower and compare:
        raise InputError("--compare runs two federations", way_out="Use it without --transport flower.")
    plans = [parsed.federation.plan, *([_BASELINE] if compare and parsed.federation.plan != _BASELINE else [])]
    stores = {plan: FederationStore(folder if plan == plans[0] else folder / plan) for plan in plans}
    for store in stores.values():  # before torch is imported
        store.read() if resume else store.check_new()
    try:
        results = asyncio.run(_run_all(parsed, stores, over, resume=resume, quiet=as_json))
    except KeyboardInterrupt:
        if stores[plans[0]].exists:
            print_note(f"completed rounds are kept in {folder}: continue with --resume")
        raise
    if as_json:
        print_json({"version": __version__, "file": str(file), "folder": str(folder), "results": results})
    else:
        print_federation(results)
        click.echo(f"weights, journal and federation.html: {folder}")
    return int(any(task["failed"] for result in results for task in result["tasks"]))


@dataclass(frozen=True, slots=True)
class _Transport:
    """How devices are reached."""

    is_flower: bool
    superlink: str
    root_certificates: str
    node_key: str
    insecure: bool

    @property
    def security(self) -> Security:
        from carpool.backends.flower.processes import Security

        return Security(self.insecure or not self.superlink, self.root_certificates, self.node_key)

    def check(self, file: FederationFile, device: str) -> None:
        """InputError for options that cannot work, before anything is started."""
        from carpool.backends.flower.processes import check_installed

        check_installed()
        names = [each.name for each in file.devices]
        if device and device not in names:
            raise InputError(f"the file has no device {device!r}", way_out=f"Name one of: {', '.join(names)}.")
        if device and not self.superlink:
            raise InputError("--device needs --superlink", way_out="Give the address of the federation's SuperLink.")
        if self.superlink:
            self.security.check(self.superlink)

    @asynccontextmanager
    async def devices(self, file: FederationFile, forks: ForkServer, folder: Path) -> AsyncIterator[Devices]:
        """The devices of a federation."""
        if not self.is_flower:
            from carpool.backends.federation_devices import EmbeddedDevices

            yield EmbeddedDevices(file, forks, folder)
            return
        from carpool.backends.flower.run import flower_devices

        async with flower_devices(file, forks, folder, self.superlink, self.security) as (devices, _):
            yield devices


async def _be_device(file: FederationFile, name: str, folder: Path, over: _Transport) -> int:
    from carpool.backends.federation_run import fork_server
    from carpool.backends.flower.run import serve_device

    log = folder / f"supernode-{name}.log"
    print_note(f"device {name} of the SuperLink {over.superlink}; Flower's log is {log}; Ctrl-C ends it")
    async with fork_server() as forks:
        await serve_device(file, name, forks, folder, over.superlink, over.security)
    return 0


async def _run_all(
    file: FederationFile, stores: Mapping[str, FederationStore], over: _Transport, *, resume: bool, quiet: bool
) -> list[dict[str, Any]]:
    """Run the federation under each plan, in a folder of its own."""
    from carpool.backends.federation_run import fork_server

    found = []
    async with fork_server() as forks:
        for plan, store in stores.items():
            store.folder.mkdir(parents=True, exist_ok=True)
            async with over.devices(file, forks, store.folder) as devices:
                found.append(await _run(file, plan, store, forks, devices, resume=resume, quiet=quiet))
    return found


async def _run(
    file: FederationFile,
    plan: str,
    store: FederationStore,
    forks: ForkServer,
    devices: Devices,
    *,
    resume: bool,
    quiet: bool,
) -> dict[str, Any]:
    from carpool.backends.federation_run import FederationRun
    from carpool.cli.render.federation_page import live_page
    from carpool.cli.render.federation_table import live_federation
    from carpool.federated.figures import FederationFigures

    file = replace(file, federation=replace(file.federation, plan=plan))
    figures = FederationFigures(file.federation)
    with (
        live_federation(file, figures, quiet=quiet) as show,
        live_page(store.folder, file.federation) as page,
    ):
        run = FederationRun(file, store, [figures, show, *page], resume=resume)
        tasks = await run.run(forks, devices)
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
