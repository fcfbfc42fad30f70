"""``carpool run``: schedule and run all jobs of a file on this machine's devices."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import click

from carpool import __version__
from carpool.cli.support.command_line import ProgramCommand, given_program, job_options
from carpool.cli.support.executor_start import executor_options, start_executor, start_ready
from carpool.cli.support.fleet import EngineChoice, engine_options, find_fleet
from carpool.cli.support.options import (
    DEVICES_HELP,
    MEMORY_CAP_HELP,
    guard_stdout,
    log_options,
    print_note,
    sweep_option,
)
from carpool.core.errors import InputError
from carpool.core.host_resources import UNKNOWN, HostResources

if TYPE_CHECKING:
    from carpool.cli.render.live_table import RunDisplay
    from carpool.cli.support.executor_start import StartClient
    from carpool.cli.support.fleet import Fleet
    from carpool.cli.support.run_lookup import ChosenRun
    from carpool.jobs.devices import LocalDevice
    from carpool.jobs.job_file import ListedJob
    from carpool.runtime.executor.client import ExecutorOptions
    from carpool.runtime.process.launch import Launched
    from carpool.service.daemon.batch_run import BatchRun, RunEnd
    from carpool.service.fleet.executor_access import StartExecutor

PREFERRED = ("carpool", "afs", "fifo:bypass=true")  # the default policy: the first of these that is installed
_REFRESH_S = 0.25
_LOG_LEVEL = "error"  # the display shows the failures of jobs

_EPILOG = """\b
Examples:
  carpool run jobs.toml
  carpool run -- python train.py --lr 0.1
  carpool run jobs.toml --devices cpu:4 --policy las --json > result.json
  carpool run jobs.toml --sweep lr=0.1,0.01 --sweep width=64,128
  carpool run jobs.toml --resume
  carpool run jobs.toml --devices cuda --memory-cap 40GiB
  carpool run jobs.toml --engine hosts --hosts lab.toml
  carpool run jobs.toml --engine ray --ray-address 10.0.0.5:6379
"""


@click.command("run", cls=ProgramCommand, epilog=_EPILOG)
@click.argument("jobs", required=False, metavar="[JOBS.toml]")
@job_options
@sweep_option
@click.option(
    "--policy",
    metavar="NAME[:key=value]…",
    help=f"Scheduling policy, as listed by carpool policies. [default: {PREFERRED[0]}]",
)
@click.option(
    "--devices",
    default="",
    metavar="SPEC",
    help=DEVICES_HELP,
)
@click.option(
    "--state", metavar="DIR", help="Folder of the journal, logs and checkpoints. [default: .carpool/runs/NAME]"
)
@click.option(
    "--resume",
    is_flag=False,
    flag_value="",
    default=None,
    metavar="[RUN]",
    help="Resume an interrupted run: the newest of this job file, or the one named.",
)
@click.option("--journal", metavar="FILE", help="Write all events and plans to this file too, as JSON lines.")
@click.option("--oversubscribe", is_flag=True, help="Let devices of cpu:CxK share cores.")
@engine_options
@click.option(
    "--lanes",
    type=click.Choice(["auto", "slice"]),
    default="auto",
    show_default=True,
    help="auto: jobs that share a GPU run concurrently where possible; slice: they take turns.",
)
@click.option(
    "--warm",
    type=click.IntRange(0, 8),
    default=1,
    show_default=True,
    help="Processes kept ready on each GPU while jobs wait, so that the next job skips CUDA's initialisation; 0: none.",
)
@click.option(
    "--reducer",
    type=click.Choice(["shared", "group"]),
    default="shared",
    show_default=True,
    help="How gradients are combined across a job's devices. shared: in shared memory; group: with gloo.",
)
@click.option(
    "--memory-cap",
    default="",
    metavar="SIZE",
    help=MEMORY_CAP_HELP,
)
@click.option(
    "--check/--no-check",
    default=True,
    help="Call every entry once before any job starts, and report those that raise. [default: --check]",
)
@log_options(_LOG_LEVEL)
@click.option("--json", "as_json", is_flag=True, help="Print JSON only.")
def run(
    jobs: str | None,
    name: str,
    resumable: bool,
    env: tuple[str, ...],
    settings: tuple[str, ...],
    sweep: tuple[str, ...],
    policy: str | None,
    devices: str,
    state: str | None,
    resume: str | None,
    journal: str | None,
    oversubscribe: bool,
    engine: str,
    hosts_file: str,
    ray_address: str,
    ray_idle: float,
    max_code: str,
    lanes: str,
    warm: int,
    reducer: str,
    memory_cap: str,
    check: bool,
    log_level: str | None,
    log_format: str | None,
    as_json: bool,
) -> int:
    """Run all jobs of a file, or one program, on this machine.

    A program runs in the current folder, and its output is printed. Options of carpool come before --, the program and
    its own options after it.

    Exit code 0 when every job finished, 1 when one failed, 2 for bad input (no job was started), 130 when interrupted
    with Ctrl-C: all jobs stop at a step boundary with a checkpoint, and --resume continues from there.
    """
    environment = _configure_logging(log_level, log_format)
    is_local = engine == "local"
    # first, because importing torch takes longer than everything else
    launched = launch(environment) if is_local else None
    from carpool.cli.support.run_lookup import look_up
    from carpool.core.units import parse_cap
    from carpool.jobs.sweep import parse_sweep_options
    from carpool.policies.registry import attribute_errors
    from carpool.runtime.sharing.mps_daemon import check_lanes

    if jobs is None and resume and resume.endswith(".toml"):
        jobs, resume = resume, ""  # the word after --resume was the job file
    program = given_program(name, resumable, env, settings, jobs)
    given = look_up(jobs, state, resume, parse_sweep_options(sweep), program)
    choice = EngineChoice(engine, hosts_file, ray_address, ray_idle, max_code)
    fleet = find_fleet(choice, given.folder.path, given.jobs, devices=devices)
    click.get_current_context().call_on_close(fleet.close)
    found, supplies = _fitting_devices(given, fleet, devices, oversubscribe=oversubscribe)
    check_reducer(reducer, given.jobs)
    cap = parse_cap(memory_cap, "--memory-cap")
    check_lanes(found, mps=lanes == "auto", memory_cap=cap)
    if cap and not any(device.cuda is not None for device in found):
        print_note("on CPU cores --memory-cap counts weights and optimizer state, not the memory of a step")
    options = executor_options(lanes, warm, reducer, cap) if fleet.members else None
    client = partial(start_executor, lanes=lanes, warm=warm, reducer=reducer, memory_cap=cap, launched=launched)
    chosen = policy or given.policy or default_policy()
    stdout = sys.stdout if program is not None else None
    with guard_stdout():
        run = prepare(given, found, chosen, _starter(given, client, check=check), journal, supplies, fleet, options)
        fleet.is_ours = True
        try:
            with attribute_errors(chosen, strictly=True):
                end = watch(run, choose_display(run, as_json=as_json, output=stdout))
        finally:
            run.close()
    _print_result(run, end, as_json=as_json, is_program=stdout is not None)
    return exit_code(run, end)


def _fitting_devices(
    given: ChosenRun, fleet: Fleet, devices: str, *, oversubscribe: bool
) -> tuple[tuple[LocalDevice, ...], HostResources]:
    """The devices and host resources of this machine, none where other machines are used; checked to fit the jobs."""
    from carpool.backends.fleet import fleet_cluster
    from carpool.jobs.devices import as_cluster
    from carpool.jobs.feasibility import check_fit
    from carpool.jobs.host import host_supplies

    members = fleet.members
    found = () if members else _own_devices(given, devices, oversubscribe=oversubscribe)
    supplies = UNKNOWN if members else host_supplies(given.folder.path)
    cluster = fleet_cluster([each.member for each in members]) if members else as_cluster(found, supplies)
    for note in filter(None, check_fit(given.jobs, cluster)):
        _echo(note)
    return found, supplies


def _starter(given: ChosenRun, start: StartClient, *, check: bool) -> StartExecutor:
    """The function that starts the executor; for trainings it waits until their entries are checked."""
    if not any(program.entry for _, program in given.jobs):
        return start
    return partial(start_ready, start=start, check=given.jobs if check and not given.resume else ())


def _print_result(run: BatchRun, end: RunEnd, *, as_json: bool, is_program: bool) -> None:
    from carpool.cli.render.run_summary import as_document, print_summary

    if as_json:
        click.echo(json.dumps(as_document(run)))
        return
    with guard_stdout() if is_program else nullcontext():  # stdout is the program's
        print_summary(run, end)


def _own_devices(given: ChosenRun, devices: str, *, oversubscribe: bool) -> tuple[LocalDevice, ...]:
    """This machine's devices: those named, else those of the run that is resumed, else all."""
    from carpool.jobs.devices import foreign_process_note, list_gpus, overlap_note, parse_devices, usable_devices

    is_new = devices or given.devices is None
    most = usable_devices(spec for spec, _ in given.jobs)
    found = parse_devices(devices, oversubscribe=oversubscribe, most_on_cpu=most) if is_new else given.devices or ()
    others = foreign_process_note(list_gpus()) if any(device.cuda is not None for device in found) else ""
    for note in filter(None, [others, overlap_note(found)]):
        _echo(note)
    return tuple(found)


def _configure_logging(level: str | None, fmt: str | None) -> dict[str, str]:
    """Log to stderr. Returns the variables that make the executor do the same."""
    from carpool.logs import LEVEL_VARIABLE, configure_logging, export_settings

    configure_logging(level or os.environ.get(LEVEL_VARIABLE, "") or _LOG_LEVEL, fmt or "")
    environment: dict[str, str] = {}
    export_settings(level or "", fmt or "", environment)
    return environment


def launch(environment: Mapping[str, str]) -> Launched | None:
    """Launch the executor of this machine, which imports torch while the run is prepared; it ends with this command."""
    from carpool.runtime.process.launch import launch_executor

    launched = launch_executor(environment)
    click.get_current_context().call_on_close(launched.kill)
    return launched


def _echo(words: str) -> None:
    click.echo(f"carpool: {words}", err=True)


def default_policy() -> str:
    """The first of the preferred policies that is installed."""
    from carpool.policies.registry import POLICIES

    return next(name for name in PREFERRED if name.partition(":")[0] in POLICIES)


def prepare(
    given: ChosenRun,
    devices: Sequence[LocalDevice],
    policy: str,
    start: StartExecutor,
    journal: str | None = None,
    supplies: HostResources = UNKNOWN,
    fleet: Fleet | None = None,
    options: ExecutorOptions | None = None,
) -> BatchRun:
    """A run that is ready to start, with its folder locked."""
    from carpool.backends.profile_library import ProfileLibrary
    from carpool.service.daemon.batch_run import BatchRun, RunRequest

    request = RunRequest(
        given.name,
        given.jobs,
        tuple(devices),
        policy,
        __version__,
        supplies,
        profiles=ProfileLibrary().beliefs(given.jobs),
        journal=Path(journal) if journal else None,
        members=() if fleet is None else fleet.members,
        source=None if fleet is None else fleet.source,
        options=options,
        tell=_echo,
    )
    run = BatchRun.open(request, given.folder, start)
    for notice in run.notices:
        _echo(notice)
    return run


def choose_display(run: BatchRun, *, as_json: bool, output: TextIO | None = None) -> RunDisplay:
    """A table on a terminal, lines elsewhere; with ``output``, the jobs' output; nothing with --json."""
    from carpool.cli.render.live_table import JobOutput, LineDisplay, LiveTable, NullDisplay

    if as_json:
        return NullDisplay()
    if output is not None:
        return JobOutput(run, output)
    return LiveTable(run) if sys.stderr.isatty() else LineDisplay(run)


def watch(run: BatchRun, display: RunDisplay) -> RunEnd:
    """Run to the end and show progress; Ctrl-C stops at a step boundary with checkpoints, a second one without."""
    import asyncio

    return asyncio.run(_watched(run, display))


async def _watched(run: BatchRun, display: RunDisplay) -> RunEnd:
    import asyncio

    loop = asyncio.get_running_loop()
    for name in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(name, _interrupt, run)

    async def refresh() -> None:
        while True:
            await asyncio.sleep(_REFRESH_S)
            display.refresh()

    refreshing = asyncio.create_task(refresh())
    try:
        with display.shown():
            return await run.run()
    finally:
        refreshing.cancel()
        display.refresh()
        for name in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(name)


def _interrupt(run: BatchRun) -> None:
    words = "stopping all jobs at the next step with checkpoints; press Ctrl-C again to stop at once"
    if lost := run.commands_without_checkpoints():
        words += f"\ncommands that keep no state of their own start again with --resume: {', '.join(lost)}"
    if run.is_interrupted:
        words = "stopping at once"
    elif not run.has_begun:
        words = "stopping; no job has started yet"
    _echo(words)
    run.interrupt()


def check_reducer(reducer: str, jobs: Sequence[ListedJob]) -> None:
    """Refuse jobs that need shared memory if --reducer excludes it."""
    joint = [spec.id for spec, program in jobs if program.sync_batchnorm]
    if reducer == "group" and joint:
        raise InputError(
            f"--reducer group, but job {joint[0]!r} has sync_batchnorm = true, which needs shared memory",
            way_out="Use --reducer shared, or set sync_batchnorm = false.",
        )


def exit_code(run: BatchRun, end: RunEnd) -> int:
    """0 all finished or stopped by halving, 1 a job was not, 130 interrupted and resumable."""
    from carpool.core.model import Phase
    from carpool.service.daemon.batch_run import RunEnd

    if end is RunEnd.INTERRUPTED:
        return 130
    accounts = run.accounting.accounts.values()
    return 0 if all(account.phase is Phase.FINISHED or account.is_stopped for account in accounts) else 1
