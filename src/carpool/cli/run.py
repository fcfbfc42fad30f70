"""``carpool run``: all jobs of a file on this machine's devices, scheduled and shared."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from carpool import __version__
from carpool.cli.checked_start import start_checked
from carpool.cli.foreign_words import keeping_stdout
from carpool.core.errors import InputError
from carpool.core.supplies import UNKNOWN, Supplies

if TYPE_CHECKING:
    from carpool.backends.local import ExecutorPort, RunEnd
    from carpool.backends.running import LocalRun, StartLink
    from carpool.cli.board import Board
    from carpool.cli.runs import ChosenRun
    from carpool.runtime.devices import LocalDevice
    from carpool.runtime.jobfile import Listed

PREFERRED = ("carpool", "afs", "fifo:bypass=true")  # the default policy: the first of these that there is

_EPILOG = """\b
Examples:
  carpool run jobs.toml
  carpool run jobs.toml --devices cpu:4 --policy las --json > result.json
  carpool run jobs.toml --resume
  carpool run jobs.toml --devices cuda --memory-cap 40GiB
"""


@click.command("run", epilog=_EPILOG)
@click.argument("jobs", required=False, metavar="JOBS.toml")
@click.option("--policy", metavar="NAME[:key=value]…", help=f"Who runs where. [default: {PREFERRED[0]}]")
@click.option(
    "--devices",
    default="",
    metavar="SPEC",
    help="cpu:4, cpu:2x1,1x2, cuda, cuda:0,1. [default: all GPUs, else all cores]",
)
@click.option("--state", metavar="DIR", help="Where journal, logs and checkpoints go. [default: .carpool/runs/NAME]")
@click.option(
    "--resume",
    is_flag=False,
    flag_value="",
    default=None,
    metavar="[RUN]",
    help="Go on with an interrupted run: the newest of this job file, or the one named.",
)
@click.option("--journal", metavar="FILE", help="Write every fact and plan here too.")
@click.option("--oversubscribe", is_flag=True, help="Let devices of cpu:CxK share cores.")
@click.option(
    "--lanes",
    type=click.Choice(["auto", "slice"]),
    default="auto",
    show_default=True,
    help="auto: jobs that share a GPU compute at the same time where that can be; slice: they take turns.",
)
@click.option(
    "--warm",
    type=click.IntRange(0, 8),
    default=1,
    show_default=True,
    help="Processes kept ready on each GPU while jobs wait, so that the next need not wait for CUDA; 0: none.",
)
@click.option(
    "--reducer",
    type=click.Choice(["shared", "group"]),
    default="shared",
    show_default=True,
    help="How a step's gradients meet when a job has several devices. shared: in memory; group: by gloo's messages.",
)
@click.option(
    "--memory-cap",
    default="",
    metavar="SIZE",
    help="Let the jobs on each device take no more than this together: they take turns, and park in host memory.",
)
@click.option(
    "--check/--no-check",
    default=True,
    help="Call every entry once before anything starts, so that one that raises is told at once.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON and nothing else.")
def command(
    jobs: str | None,
    policy: str | None,
    devices: str,
    state: str | None,
    resume: str | None,
    journal: str | None,
    oversubscribe: bool,
    lanes: str,
    warm: int,
    reducer: str,
    memory_cap: str,
    check: bool,
    as_json: bool,
) -> int:
    """Run all jobs of a file on this machine.

    Exit code 0 when every job finished, 1 when one failed, 2 for bad input (nothing was started), 130 when interrupted
    with Ctrl-C: all jobs stop at a step boundary with a checkpoint, and --resume goes on from there.
    """
    from carpool.cli.result import as_document, print_summary
    from carpool.cli.runs import look_up
    from carpool.core.units import parse_cap
    from carpool.policies.blame import blaming
    from carpool.runtime.devices import as_cluster, outsider_note, overlap_note, parse_devices
    from carpool.runtime.fitting import check_fit
    from carpool.runtime.gpus import list_gpus
    from carpool.runtime.machine import supplies_here

    if jobs is None and resume and resume.endswith(".toml"):
        jobs, resume = resume, ""  # the word behind --resume was the job file
    given = look_up(jobs, state, resume)
    found = parse_devices(devices, oversubscribe=oversubscribe) if devices or given.devices is None else given.devices
    others = outsider_note(list_gpus()) if any(device.cuda is not None for device in found) else ""
    supplies = supplies_here(given.folder.path)
    for note in filter(None, [others, overlap_note(found), *check_fit(given.jobs, as_cluster(found, supplies))]):
        click.echo(f"carpool: {note}", err=True)
    check_reducer(reducer, given.jobs)
    cap = parse_cap(memory_cap, "--memory-cap")
    start = partial(start_executor, lanes=lanes, warm=warm, reducer=reducer, memory_cap=cap)
    if check and not given.resume:
        start = partial(start_checked, start=start, jobs=given.jobs)
    decides = policy or given.policy or default_policy()
    with keeping_stdout():
        run = prepare(given, found, decides, journal, supplies)
        try:
            with blaming(decides, strictly=True):
                ending = watch(run, choose_board(run, as_json=as_json), start)
        finally:
            given.folder.let_go()
    if as_json:
        click.echo(json.dumps(as_document(run)))
    else:
        print_summary(run, ending)
    return exit_code(run, ending)


def default_policy() -> str:
    """The best elastic policy that there is."""
    from carpool.policies.registry import POLICIES

    return next(name for name in PREFERRED if name.partition(":")[0] in POLICIES)


def prepare(
    given: ChosenRun,
    devices: Sequence[LocalDevice],
    policy: str,
    journal: str | None = None,
    supplies: Supplies = UNKNOWN,
) -> LocalRun:
    """A run that is ready to go; its folder is held from now on."""
    from carpool.backends.running import LocalRun, RunRequest
    from carpool.backends.shelf import Shelf
    from carpool.policies.registry import parse_policy

    asked = RunRequest(given.name, given.jobs, tuple(devices), parse_policy(policy), policy, __version__, supplies)
    given.folder.hold()
    copy = Path(journal) if journal else None
    return LocalRun(asked, given.folder, resume=given.resume, copy=copy, profiles=Shelf().beliefs(given.jobs))


def choose_board(run: LocalRun, *, as_json: bool) -> Board:
    """A table on a terminal, lines elsewhere, nothing where a program reads."""
    from carpool.cli.board import Lines, LiveTable, Quiet

    if as_json:
        return Quiet()
    return LiveTable(run) if sys.stderr.isatty() else Lines(run)


def watch(run: LocalRun, board: Board, start: StartLink) -> RunEnd:
    """Run to the end while a board shows it; Ctrl-C stops with checkpoints, a second one at once."""
    return asyncio.run(_watched(run, board, start))


async def _watched(run: LocalRun, board: Board, start: StartLink) -> RunEnd:
    loop = asyncio.get_running_loop()
    for name in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(name, _interrupt, run)

    async def refresh() -> None:
        while True:
            await asyncio.sleep(0.25)
            board.refresh()

    refreshing = asyncio.create_task(refresh())
    try:
        with board.shown():
            return await run.go(start)
    finally:
        refreshing.cancel()
        board.refresh()
        for name in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(name)


def _interrupt(run: LocalRun) -> None:
    words = "stopping at the next steps with checkpoints; once more to stop at once"
    if run.is_interrupted:
        words = "stopping at once"
    elif not run.has_begun:
        words = "stopping; no job has begun yet"
    click.echo(f"carpool: {words}", err=True)
    run.interrupt()


def check_reducer(reducer: str, jobs: Sequence[Listed]) -> None:
    """Refuse what needs shared memory where there is to be none."""
    joint = [spec.id for spec, program in jobs if program.sync_batchnorm]
    if reducer == "group" and joint:
        raise InputError(
            f"--reducer group, but job {joint[0]!r} has sync_batchnorm = true, which goes through shared memory",
            way_out="Use --reducer shared, or set sync_batchnorm = false.",
        )


async def start_executor(
    devices: Sequence[LocalDevice],
    state: Path,
    *,
    lanes: str = "auto",
    warm: int = 0,
    reducer: str = "shared",
    memory_cap: int = 0,
) -> ExecutorPort:
    """The executor process of this machine."""
    from carpool.runtime.link import ExecutorLink, ExecutorOptions

    options = ExecutorOptions(mps=lanes == "auto", warm=warm, is_closed=True, reducer=reducer, memory_cap=memory_cap)
    return await ExecutorLink.start(devices, state, options=options)


def exit_code(run: LocalRun, ending: RunEnd) -> int:
    """0 all finished, 1 a job did not, 130 interrupted and resumable."""
    from carpool.backends.local import RunEnd
    from carpool.core.model import Phase

    if ending is RunEnd.INTERRUPTED:
        return 130
    return 0 if all(account.phase is Phase.FINISHED for account in run.ledger.accounts.values()) else 1
