"""Table and timeline of a plan."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite

import click
from rich.console import Console
from rich.table import Table

from carpool.backends.job_accounting import JobAccount
from carpool.cli.render.job_rows import short
from carpool.cli.render.live_table import held
from carpool.core.units import format_params
from carpool.service.queries.forecast import GUESSED_S, Forecast, JobForecast
from carpool.sim.report.units import duration

_WIDTH, _TIMELINE = 140, 60
_BUSY = " 123456789+"


def print_plan(forecast: Forecast, policy: str) -> None:
    """Print the table, the timeline and a summary."""
    names = dict(forecast.names)
    table = Table(box=None, pad_edge=False, header_style="dim")
    has_params = any(job.account.spec.params for job in forecast.jobs)
    for heading in ("job", *(["parameters"] if has_params else []), "first on"):
        table.add_column(heading, no_wrap=True)
    for heading in ("start", "end", "80 % range", "steps", "steps/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("based on", no_wrap=True)
    for job in forecast.jobs:
        name, *cells = _row(job, names)
        params = [format_params(job.account.spec.params)] if has_params else []
        table.add_row(name, *params, *cells, style="" if job.account.ended_at is not None else "red")
    console = Console()
    console.width = max(console.width, _WIDTH)
    console.print(table)
    for line in timeline(forecast):
        click.echo(line)
    for line in _summary_lines(forecast, policy):
        click.echo(line)


def _summary_lines(forecast: Forecast, policy: str) -> Iterator[str]:
    summary = forecast.summary
    if isfinite(summary.makespan_s):
        yield (
            f"policy {policy}: {summary.finished} of {summary.jobs} jobs end within {duration(summary.makespan_s)}, "
            f"average completion time {duration(summary.avg_jct_s)}, device utilisation {summary.utilisation:.0%}"
        )
    for job in forecast.jobs:
        deadline, end = job.account.spec.deadline_s, job.account.ended_at
        if deadline and (end is None or end > deadline):
            when = "never ends" if end is None else f"ends after {duration(end)}"
            yield f"{job.account.spec.id} misses its deadline of {duration(deadline)}: it {when}"
    unknown = sum(job.steps is None for job in forecast.jobs)
    if unknown:
        yield f"the length of {unknown} of {summary.jobs} jobs is unknown: each is simulated as {duration(GUESSED_S)}"
    if any("guessed" in job.basis for job in forecast.jobs):
        yield "some rates or lengths are guesses: measure them with carpool profile ENTRY, or add --probe"


def _row(job: JobForecast, names: dict[int, str]) -> tuple[str, ...]:
    account = job.account
    first = next((given.allocation for given in account.decisions if given.allocation is not None), None)
    return (
        short(account.spec.id),
        "never" if first is None else held(first, names),
        "–" if job.starts_at is None else duration(job.starts_at),
        _end(job),
        "–" if job.range_s is None else " … ".join(map(duration, job.range_s)),
        "?" if job.steps is None else f"{job.steps:.0f}",
        "?" if job.steps_per_s is None else f"{job.steps_per_s:.1f}",
        f"{job.basis} (± {job.spread:.0%})" if first is not None else job.basis,
    )


def _end(job: JobForecast) -> str:
    if job.account.ended_at is None:
        return "never"
    return "?" if job.ends_at is None else duration(job.ends_at)


def timeline(forecast: Forecast) -> list[str]:
    """One line per job: its number of devices over time, a dot while it waits."""
    end = max((job.account.ended_at or 0.0 for job in forecast.jobs), default=0.0)
    if not end:
        return []
    width = max(len(short(job.account.spec.id)) for job in forecast.jobs)
    lines = [f"{short(job.account.spec.id):<{width}}  {_strip(job.account, end)}" for job in forecast.jobs]
    axis = f"{'':<{width}}  0{duration(end):>{_TIMELINE - 1}}"
    return [*lines, axis, f"{'':<{width}}  a digit: devices held; ·: waiting"]


def _strip(account: JobAccount, end: float) -> str:
    cells = []
    for cell in range(_TIMELINE):
        at = (cell + 0.5) / _TIMELINE * end
        if account.ended_at is not None and at >= account.ended_at:
            break
        now = next((given for given in reversed(account.decisions) if given.at <= at), None)
        count = 0 if now is None or now.allocation is None else now.allocation.num_devices
        cells.append(_BUSY[min(count, len(_BUSY) - 1)] if count else "·")
    return "".join(cells) or "▏"  # shorter than one cell
