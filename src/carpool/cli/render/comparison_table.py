"""Terminal table that compares policies on one trace."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

from rich.console import Console
from rich.table import Table

from carpool.sim.comparison import SimulationResult
from carpool.sim.report.units import duration

_SECONDS = {  # field of the summary -> heading; lower is better
    "avg_jct_s": "avg JCT",
    "p50_jct_s": "p50",
    "p99_jct_s": "p99",
    "avg_wait_s": "avg wait",
    "weighted_jct_s": "weighted",
    "makespan_s": "makespan",
}

_WIDTH = 132  # of the whole table; a narrower terminal wraps lines


def print_comparison(results: Sequence[SimulationResult]) -> None:
    """Print one row per policy, the best value of each column in bold."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("policy", no_wrap=True)
    for heading in (*_SECONDS.values(), "util", "preempt", "resize", "done", "CPU"):
        table.add_column(heading, justify="right", no_wrap=True)
    best = {key: min(_finite(results, key), default=None) for key in _SECONDS}
    for result in results:
        summary = result.summary
        cells = [_seconds(getattr(summary, key), best[key]) for key in _SECONDS]
        util = f"{summary.utilisation:.1%}" if isfinite(summary.utilisation) else "–"
        done = f"{summary.finished}/{summary.jobs}"
        table.add_row(
            result.policy,
            *cells,
            util,
            str(summary.preemptions),
            str(summary.resizes),
            done,
            f"{result.cpu_s:.2f} s",
        )
    console = Console()
    console.width = max(console.width, _WIDTH)
    console.print(table)


def _finite(results: Sequence[SimulationResult], key: str) -> list[float]:
    values = [getattr(result.summary, key) for result in results]
    return [value for value in values if isfinite(value)]


def _seconds(value: float, best: float | None) -> str:
    if not isfinite(value):
        return "–"
    return f"[bold]{duration(value)}[/bold]" if value == best else duration(value)
