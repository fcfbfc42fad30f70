"""``carpool simulate``: simulate a trace under one or more policies."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from carpool import __version__
from carpool.cli.support.options import guard_stdout, json_option, print_json, print_note
from carpool.cli.verbs.trace import dropped_row_lines, format_option, skip_invalid_option
from carpool.core.errors import InputError

if TYPE_CHECKING:
    from carpool.sim.comparison import SimulationRequest, SimulationResult


_MIN_ROUND_S = 0.001
_LINE_EVERY_S = 5.0  # between lines of progress where stderr is no terminal
_EPILOG = """\b
Examples:
  carpool simulate --trace philly.csv --cluster 64x8xV100 --policy fifo --policy srtf --policy las
  carpool simulate --trace jobs.csv --cluster 2x4xV100,4x4xP100 --policy ./mine.py:MyPolicy --report out.html
  carpool simulate --trace a.trace --world gavel:throughputs.json --cluster 2x4xV100,3x8xK80 --policy gavel --rounds 360
"""
_POLICY_HELP = "Scheduling policy, as listed by carpool policies. Repeatable. [default: fifo]"
_WORLD_HELP = (
    "Performance model: plain (devices equally fast, moves free), wired (links of different speeds), "
    "parts (four device types), colocation:FILE, gavel:FILE, pollux:DIR, profile:FILE, or a TOML file."
)
_FAILURES_HELP = "Failures to inject: CSV of at_s,event,target, or node_mtbf_s=…:job_mtbf_s=…."


@click.command("simulate", epilog=_EPILOG)
@click.option("--trace", required=True, metavar="FILE", help="Jobs with submission times; the format is detected.")
@click.option(
    "--cluster", required=True, metavar="SPEC", help="NODESxDEVICESxTYPE[,…], such as 64x8xV100, or a TOML file."
)
@click.option("--policy", "policies", multiple=True, metavar="NAME[:key=value]…", help=_POLICY_HELP)
@click.option("--world", default="plain", show_default=True, metavar="WORLD", help=_WORLD_HELP)
@click.option("--rounds", "round_s", default=0.0, metavar="S", help="Plan every S seconds instead of at every event.")
@click.option("--seed", type=int, help="Random seed.  [default: seed in the world's file, else 0]")
@click.option("--failures", default="", metavar="FILE|RATES", help=_FAILURES_HELP)
@format_option
@skip_invalid_option
@click.option("--max-jobs", type=click.IntRange(min=1), metavar="N", help="Simulate only the first N jobs.")
@json_option
@click.option("--report", default="", metavar="FILE.html", help="Write an HTML page with charts and timelines.")
@click.option("--journal", default="", metavar="FILE", help="Write events and plans as JSON lines (one policy only).")
def simulate(policies: tuple[str, ...], as_json: bool, report: str, **options: Any) -> int:
    """Simulate a trace under one or more policies and compare completion times and utilisation.

    Policies are simulated in parallel processes.

    Exit code: 0 every job finished under every policy, 1 some did not, 2 bad input.
    """
    from carpool.sim.comparison import SimulationRequest, compare, weighted_jct_bound_s
    from carpool.sim.worlds import seed_in_file

    policies = policies or ("fifo",)
    with guard_stdout():
        _check(options["round_s"], policies, options["journal"])
    _check_distinct_files(trace=options["trace"], report=report, journal=options["journal"])
    if options["seed"] is None:
        options["seed"] = seed_in_file(options["world"])
    requests = [SimulationRequest(policy=policy, record=bool(report), **options) for policy in policies]
    with guard_stdout(), _progress(policies, bars=not as_json and sys.stderr.isatty()) as report_progress:
        results = compare(requests, report_progress)
        bound_s = weighted_jct_bound_s(requests[0])
    if report:
        write_report(report, requests[0], results, bound_s)
    for line in dropped_row_lines(results[0].dropped, results[0].dropped_rows):
        print_note(line)
    if as_json:
        print_json(as_document(requests[0], results, bound_s))
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
        print_note(f"{note}" + (f" ({count} times)" if count > 1 else ""))
    print_comparison(results)
    if bound_s is not None:
        print_note(f"lower bound of the weighted JCT under any policy: {bound_s:.1f} s")
    for result in results:
        unfinished = result.summary.jobs - result.summary.finished
        if unfinished:
            print_note(f"{unfinished} jobs never finished under {result.policy}")
    if report:
        click.echo(f"wrote {report}", err=True)


def progress_lines(
    write: Callable[[str], None], clock: Callable[[], float] = time.monotonic, every_s: float = _LINE_EVERY_S
) -> Callable[[str, float], None]:
    """A progress callback that writes one line for all policies every few seconds: ``carpool 12 %, fifo 80 %``."""
    parts: dict[str, float] = {}
    written = clock()

    def report(policy: str, part: float) -> None:
        nonlocal written
        parts[policy] = part
        if clock() - written >= every_s:
            written = clock()
            write("jobs submitted: " + ", ".join([f"{name} {done:.0%}" for name, done in parts.items()]))

    return report


@contextmanager
def _progress(policies: Sequence[str], *, bars: bool) -> Iterator[Callable[[str, float], None]]:
    """Bars on a terminal, else a line on stderr every few seconds, so that a long run in a pipe shows progress."""
    if not bars:
        yield progress_lines(print_note)
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as shown:
        tasks = {policy: shown.add_task(policy, total=1.0) for policy in policies}
        yield lambda policy, part: shown.update(tasks[policy], completed=part)
