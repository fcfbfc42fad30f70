"""The demo in simulation: made-up jobs for a busy cluster under several policies."""

from __future__ import annotations

from pathlib import Path

import click

from carpool.cli.simulate import write_report
from carpool.cli.tables import print_comparison
from carpool.sim.compare import RunInWords, compare
from carpool.sim.report import RunRecord, comparison_svg, write_page
from carpool.sim.traces.generate import Generator
from carpool.sim.traces.info import lines, summarise
from carpool.sim.traces.write import write_trace

_POLICIES = ("fifo", "fifo:bypass=true", "sjf", "las", "srtf")
_CLUSTER = "8x8xV100"


def show(folder: Path, jobs: int, seed: int) -> None:
    """Replay the jobs, print the comparison, leave trace, page and picture in the folder."""
    trace = Generator(
        jobs=jobs, seed=seed, load=0.95, devices=64, sizes=((1, 0.7), (2, 0.1), (4, 0.1), (8, 0.1))
    ).generate()
    path = folder / "demo.csv"
    write_trace(trace, path)
    click.echo(f"{jobs} made-up jobs on {_CLUSTER}:")
    for line in lines(summarise(trace, 64)):
        click.echo(f"  {line}")
    requests = [RunInWords(str(path), _CLUSTER, policy, seed=seed, record=True) for policy in _POLICIES]
    results = compare(requests)
    click.echo()
    print_comparison(results)
    first, best = results[0], min(results, key=lambda result: result.summary.avg_jct_s)
    gain = first.summary.avg_jct_s / best.summary.avg_jct_s
    if gain > 1.0:
        click.echo(
            f"\nThe same jobs on the same devices: under {best.policy} the average job is done {gain:.1f}x sooner "
            f"than under {first.policy}."
        )
    page, picture = folder / "demo.html", folder / "demo.svg"
    write_report(str(page), requests[0], results)
    runs = [RunRecord(r.policy, r.as_json(), r.recording) for r in results if r.recording is not None]
    write_page(picture, comparison_svg(runs))
    click.echo(f"Look at it: {page} (timelines, charts) and {picture}")
