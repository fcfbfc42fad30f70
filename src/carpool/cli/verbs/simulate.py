"""``carpool simulate``: simulate a trace under one or more policies."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from carpool import __version__
from carpool.cli.support.json_output import guard_stdout
from carpool.cli.verbs.trace import dropped_row_lines
from carpool.core.errors import InputError

if TYPE_CHECKING:
    from carpool.sim.comparison import SimulationRequest, SimulationResult


_MIN_ROUND_S = 0.001
_EPILOG = """\b
Examples:
  carpool simulate --trace philly.csv --cluster 64x8xV100 --policy fifo --policy srtf --policy las
  carpool simulate --trace jobs.csv --cluster 2x4xV100,4x4xP100 --policy ./mine.py:MyPolicy --report out.html
  carpool simulate --trace a.trace --world gavel:throughputs.json --cluster 2x4xV100,3x8xK80 --policy gavel --rounds 360
"""


@click.command("simulate", epilog=_EPILOG)
@click.option(
    "--trace", required=True, metavar="FILE", help="Trace of jobs with submission times; the format is detected."
)
@click.option(
    "--cluster", required=True, metavar="SPEC", help="NODESxDEVICESxKIND[,…], such as 64x8xV100, or a TOML file."
)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="NAME[:key=value]…",
    help="Scheduling policy; may be repeated. [default: fifo]",
)
@click.option(
    "--world",
    default="plain",
    show_default=True,
    metavar="WORLD",
    help="Performance model: plain, colocation:FILE, gavel:FILE, pollux:DIR, profile:FILE, parts, wired or a TOML file.",
)
@click.option(
    "--rounds",
    "round_s",
    type=float,
    default=0.0,
    metavar="S",
    help="Plan every S seconds instead of at every event.",
)
@click.option("--seed", type=int, help="Random seed.  [default: seed in the world's file, else 0]")
@click.option(
    "--failures",
    default="",
    metavar="FILE|RATES",
    help="Failures to inject: CSV of at_s,event,target, or node_mtbf_s=…:job_mtbf_s=….",
)
@click.option("--format", "format_", default=None, metavar="NAME", help="Format of the trace, if it is not detected.")
@click.option("--skip-invalid", is_flag=True, help="Skip and report invalid rows instead of stopping at the first.")
@click.option(
    "--max-jobs", type=click.IntRange(min=1), default=None, metavar="N", help="Simulate only the first N jobs."
)
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON only.")
@click.option(
    "--report", default="", metavar="FILE.html", help="Write a self-contained HTML page with charts and timelines."
)
@click.option(
    "--journal", default="", metavar="FILE", help="Write every event and plan as JSON lines (one policy only)."
)
def simulate(
    trace: str,
    cluster: str,
    policies: tuple[str, ...],
    world: str,
    round_s: float,
    seed: int | None,
    failures: str,
    format_: str | None,
    skip_invalid: bool,
    max_jobs: int | None,
    as_json: bool,
    report: str,
    journal: str,
) -> int:
    """Simulate a trace under one or more policies and compare completion times and utilisation.

    Policies are simulated in parallel processes.

    Exit code: 0 every job finished under every policy, 1 some did not, 2 bad input.
    """
    from carpool.sim.comparison import SimulationRequest, compare, weighted_jct_bound_s
    from carpool.sim.worlds import seed_in_file

    policies = policies or ("fifo",)
    with guard_stdout():
        _check(round_s, policies, journal)
    _check_distinct_files(trace=trace, report=report, journal=journal)
    requests = [
        SimulationRequest(
            trace=trace,
            cluster=cluster,
            policy=policy,
            world=world,
            format=format_,
            round_s=round_s,
            seed=seed_in_file(world) if seed is None else seed,
            failures=failures,
            skip_invalid=skip_invalid,
            max_jobs=max_jobs,
            journal=journal,
            record=bool(report),
        )
        for policy in policies
    ]
    with guard_stdout(), _progress(policies, shown=not as_json and sys.stderr.isatty()) as report_progress:
        results = compare(requests, report_progress)
        bound_s = weighted_jct_bound_s(requests[0])
    if report:
        write_report(report, requests[0], results, bound_s)
    for line in dropped_row_lines(results[0].dropped, results[0].dropped_rows):
        click.echo(f"carpool: {line}", err=True)
    if as_json:
        click.echo(json.dumps(as_document(requests[0], results, bound_s)))
    else:
        _print(results, report, bound_s)
    return 0 if all(result.summary.finished == result.summary.jobs for result in results) else 1


def _check(round_s: float, policies: Sequence[str], journal: str) -> None:
    from carpool.policies.registry import parse_policy

    if round_s and not _MIN_ROUND_S <= round_s < float("inf"):
        raise InputError(f"--rounds is {round_s}", way_out=f"Give at least {_MIN_ROUND_S} seconds.")
    for policy in policies:
        parse_policy(policy)
    repeated = next((policy for policy in policies if policies.count(policy) > 1), None)
    if repeated is not None:
        raise InputError(f"policy {repeated!r} is given twice", way_out="Give each policy once.")
    if journal and len(policies) > 1:
        raise InputError(f"--journal records one policy, {len(policies)} are given", way_out="Give one --policy.")


def _check_distinct_files(**files: str) -> None:
    """InputError if two options name the same file."""
    seen: dict[Path, str] = {}
    for option, name in files.items():
        if name:
            path = Path(name).resolve()
            if path in seen:
                raise InputError(
                    f"--{option} and --{seen[path]} are the same file {name!r}", way_out="Choose another file."
                )
            seen[path] = option


def as_document(
    request: SimulationRequest, results: Sequence[SimulationResult], bound_s: float | None = None
) -> dict[str, object]:
    """Document printed by ``--json``."""
    bounds = {} if bound_s is None else {"bounds": {"weighted_jct_s": bound_s}}
    return {
        "schema": 1,
        "version": __version__,
        "trace": request.trace,
        "cluster": request.cluster,
        "seed": request.seed,
        "dropped": results[0].dropped,
        **bounds,
        "results": [result.as_json() for result in results],
    }


def write_report(
    path: str, request: SimulationRequest, results: Sequence[SimulationResult], bound_s: float | None = None
) -> None:
    """Write the HTML page that compares the policies."""
    from carpool.sim.cluster_spec import parse_cluster
    from carpool.sim.report import ReportHead, RunRecord, node_spans, render, write_page

    cluster = parse_cluster(request.cluster)
    extra = {"world": request.world} if request.world != "plain" else {}
    if request.round_s:
        extra["rounds"] = f"{request.round_s:g} s"
    if request.failures:
        extra["failures"] = request.failures
    if bound_s is not None:
        extra["lower bound of weighted JCT"] = f"{bound_s:.1f} s"
    head = ReportHead(
        trace=request.trace,
        cluster=request.cluster,
        num_devices=cluster.num_devices,
        nodes=node_spans(cluster),
        seed=request.seed,
        version=__version__,
        dropped=results[0].dropped,
        extra=extra,
        command=shlex.join(["carpool", *sys.argv[1:]]),
    )
    runs = [
        RunRecord(result.policy, result.as_json(), result.recording)
        for result in results
        if result.recording is not None
    ]
    write_page(path, render(f"Policies on {request.trace}", head, runs))


def _print(results: Sequence[SimulationResult], report: str, bound_s: float | None) -> None:
    from carpool.cli.render.comparison_table import print_comparison

    for note, count in results[0].notes.items():
        click.echo(f"carpool: {note}" + (f" ({count} times)" if count > 1 else ""), err=True)
    print_comparison(results)
    if bound_s is not None:
        click.echo(f"carpool: lower bound of the weighted JCT under any policy: {bound_s:.1f} s", err=True)
    for result in results:
        unfinished = result.summary.jobs - result.summary.finished
        if unfinished:
            click.echo(f"carpool: {unfinished} jobs never finished under {result.policy}", err=True)
    if report:
        click.echo(f"wrote {report}", err=True)


@contextmanager
def _progress(policies: Sequence[str], *, shown: bool) -> Iterator[Callable[[str, float], None] | None]:
    """Show a progress bar per policy."""
    if not shown:
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bars:
        tasks = {policy: bars.add_task(policy, total=1.0) for policy in policies}
        yield lambda policy, part: bars.update(tasks[policy], completed=part)
