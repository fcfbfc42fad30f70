"""Table and timeline of a plan."""

from __future__ import annotations

from math import isfinite

import click
from rich.console import Console
from rich.table import Table

from carpool.backends.job_accounting import JobAccount
from carpool.cli.render.job_rows import short
from carpool.cli.render.live_table import held
from carpool.service.queries.forecast import Forecast, JobForecast
from carpool.sim.report.units import duration

_WIDTH, _TIMELINE = 140, 60
_BUSY = " 123456789+"


def print_plan(forecast: Forecast, policy: str) -> None:
    """Everything, on stdout."""
    names = dict(forecast.names)
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("job", "first on"):
        table.add_column(heading, no_wrap=True)
    for heading in ("start", "end", "80 % between", "steps", "steps/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("believed because", no_wrap=True)
    for job in forecast.jobs:
        table.add_row(*_row(job, names), style="" if job.account.ended_at is not None else "red")
    console = Console()
    console.width = max(console.width, _WIDTH)
    console.print(table)
    for line in timeline(forecast):
        click.echo(line)
    figures = forecast.summary
    if isfinite(figures.makespan_s):
        click.echo(
            f"under {policy}: all {figures.finished} of {figures.jobs} jobs end by {duration(figures.makespan_s)}, "
            f"on average after {duration(figures.avg_jct_s)}; devices held {figures.utilisation:.0%} of the time"
        )
    for job in forecast.jobs:
        by, end = job.account.spec.deadline_s, job.account.ended_at
        if by and (end is None or end > by):
            when = "never ends" if end is None else f"ends after {duration(end)}"
            click.echo(f"{job.account.spec.id} misses its deadline: it {when}, and has {duration(by)}")
    if any("guessed" in job.basis for job in forecast.jobs):
        click.echo("some of this is guessed: measure with carpool profile ENTRY, or add --probe")


def _row(job: JobForecast, names: dict[int, str]) -> tuple[str, ...]:
    account = job.account
    first = next((given.allocation for given in account.decisions if given.allocation is not None), None)
    return (
        short(account.spec.id),
        "never" if first is None else held(first, names),
        "–" if job.starts_at is None else duration(job.starts_at),
        "never" if account.ended_at is None else duration(account.ended_at),
        "–" if job.range_s is None else " … ".join(map(duration, job.range_s)),
        "?" if job.steps is None else f"{job.steps:.0f}",
        "?" if job.steps_per_s is None else f"{job.steps_per_s:.1f}",
        f"{job.basis} (± {job.spread:.0%})" if first is not None else job.basis,
    )


def timeline(forecast: Forecast) -> list[str]:
    """A line for every job: how many devices it holds over time, a dot while it waits."""
    end = max((job.account.ended_at or 0.0 for job in forecast.jobs), default=0.0)
    if not end:
        return []
    width = max(len(short(job.account.spec.id)) for job in forecast.jobs)
    lines = [f"{short(job.account.spec.id):<{width}}  {_strip(job.account, end)}" for job in forecast.jobs]
    return [*lines, f"{'':<{width}}  0{duration(end):>{_TIMELINE - 1}}"]


def _strip(account: JobAccount, end: float) -> str:
    cells = []
    for place in range(_TIMELINE):
        at = (place + 0.5) / _TIMELINE * end
        if account.ended_at is not None and at >= account.ended_at:
            break
        now = next((given for given in reversed(account.decisions) if given.at <= at), None)
        count = 0 if now is None or now.allocation is None else now.allocation.num_devices
        cells.append(_BUSY[min(count, len(_BUSY) - 1)] if count else "·")
    return "".join(cells) or "▏"  # too short to be seen, but there
