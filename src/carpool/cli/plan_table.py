"""A plan as JSON for programs, and as a table with a small timeline for people."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

import click
from rich.console import Console
from rich.table import Table

from carpool import __version__
from carpool.backends.ledger import Account
from carpool.cli.board import held
from carpool.cli.forecast import USUAL, Forecast, Foreseen
from carpool.cli.result import Json, as_allocation
from carpool.runtime.devices import LocalDevice
from carpool.sim.report.units import duration

_WIDTH, _TIMELINE = 140, 60
_BUSY = " 123456789+"


def as_document(forecast: Forecast, policy: str, devices: Sequence[LocalDevice]) -> Json:
    """What ``plan --json`` prints."""
    figures = forecast.summary
    return {
        "schema": 1,
        "version": __version__,
        "policy": policy,
        "devices": [{"name": device.name, "kind": device.kind} for device in devices],
        "makespan_s": _number(figures.makespan_s),
        "avg_jct_s": _number(figures.avg_jct_s),
        "weighted_jct_s": _number(figures.weighted_jct_s),
        "utilisation": {"device": _number(figures.utilisation)},
        "assumed": USUAL._asdict(),
        "jobs": [_job(job, dict(forecast.names)) for job in forecast.jobs],
    }


def _job(job: Foreseen, names: dict[int, str]) -> Json:
    account = job.account
    return {
        "name": account.spec.id,
        "start_s": job.starts_at,
        "end_s": account.ended_at,
        "end_range_s": None if job.range_s is None else list(job.range_s),
        "steps": job.steps,
        "steps_per_s": job.steps_per_s,
        "spread": job.spread,
        "basis": job.basis,
        "allocations": [as_allocation(given, account.spec.batch_size, names) for given in account.decisions],
    }


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
    if any("guessed" in job.basis for job in forecast.jobs):
        click.echo("some of this is guessed: measure with carpool profile ENTRY, or add --probe")


def _row(job: Foreseen, names: dict[int, str]) -> tuple[str, ...]:
    account = job.account
    first = next((given.allocation for given in account.decisions if given.allocation is not None), None)
    return (
        account.spec.id,
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
    width = max(len(job.account.spec.id) for job in forecast.jobs)
    lines = [f"{job.account.spec.id:<{width}}  {_strip(job.account, end)}" for job in forecast.jobs]
    return [*lines, f"{'':<{width}}  0{duration(end):>{_TIMELINE - 1}}"]


def _strip(account: Account, end: float) -> str:
    cells = []
    for place in range(_TIMELINE):
        at = (place + 0.5) / _TIMELINE * end
        if account.ended_at is not None and at >= account.ended_at:
            break
        now = next((given for given in reversed(account.decisions) if given.at <= at), None)
        count = 0 if now is None or now.allocation is None else now.allocation.num_devices
        cells.append(_BUSY[min(count, len(_BUSY) - 1)] if count else "·")
    return "".join(cells) or "▏"  # too short to be seen, but there


def _number(value: float) -> float | None:
    """JSON knows no NaN."""
    return value if isfinite(value) else None
