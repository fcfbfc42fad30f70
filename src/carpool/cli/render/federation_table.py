"""Terminal output of ``carpool federate``: live cycles and the summary."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import click

from carpool.federated.federation_file import FederationFile
from carpool.federated.figures import CycleFigures, FederationFigures
from carpool.federated.messages import Aggregate, CloseCycle, EndTask, Evaluated, Record

Show = Callable[[Record], None]


@contextmanager
def live_federation(file: FederationFile, figures: FederationFigures, *, quiet: bool) -> Iterator[Show]:
    """Show each cycle: a table on a terminal, one line elsewhere, nothing if `quiet`."""
    if quiet:
        yield lambda record: None
    elif not sys.stdout.isatty():
        yield lambda record: _print_lines(record, figures)
    else:
        from rich.live import Live

        metrics: dict[str, Mapping[str, float]] = {}
        rounds: Counter[str] = Counter()
        with Live(refresh_per_second=4) as live:

            def show(record: Record) -> None:
                metrics.update({fact.task: fact.metrics for fact in record.facts if isinstance(fact, Evaluated)})
                rounds.update([order.task for order in record.orders if isinstance(order, Aggregate)])
                live.update(_table(file, figures, rounds, metrics))

            yield show


def _print_lines(record: Record, figures: FederationFigures) -> None:
    if any(isinstance(order, CloseCycle) for order in record.orders):
        click.echo(_cycle_line(figures.cycles[-1]))
    for fact in record.facts:
        if isinstance(fact, Evaluated) and fact.metrics:
            click.echo(f"  {fact.task} after round {fact.rounds}: {_words(fact.metrics)}")
    for order in record.orders:
        if isinstance(order, EndTask):
            click.echo(f"  {order.task} {'failed' if order.failed else 'ended'}: {order.reason}")


def _cycle_line(cycle: CycleFigures) -> str:
    idle = sum(cycle.idle.values()) / max(cycle.seconds * len(cycle.idle), 1e-12)
    return f"cycle {cycle.cycle}: {cycle.seconds:.2f} s, {cycle.samples} samples, {idle:.0%} idle at the barrier"


def _table(
    file: FederationFile,
    figures: FederationFigures,
    rounds: Mapping[str, int],
    metrics: Mapping[str, Mapping[str, float]],
) -> Any:
    from rich.console import Group
    from rich.table import Table

    tasks = Table("task", "rounds", "metrics", title=f"{len(figures.cycles)} cycles, plan {file.federation.plan}")
    for task in file.federation.tasks:
        tasks.add_row(task.name, f"{rounds.get(task.name, 0)} of {task.rounds}", _words(metrics.get(task.name, {})))
    devices = Table("device", "idle s in the last cycle")
    last = figures.cycles[-1].idle if figures.cycles else {}
    for device in file.devices:
        idle = last.get(device.name)
        devices.add_row(device.name, "" if idle is None else f"[red]{idle:.2f}[/red]" if idle > 0.0 else "0.00")
    return Group(tasks, devices)


def _words(metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())


def print_federation(results: Sequence[Mapping[str, Any]]) -> None:
    """Print tasks and figures of one or two runs."""
    from rich.console import Console
    from rich.table import Table

    tasks = Table("plan", "task", "rounds", "end", "metrics")
    figures = Table("plan", "cycles", "seconds", "samples", "idle at the barrier", "mismatch", "MB moved")
    for result in results:
        for task in result["tasks"]:
            tasks.add_row(result["plan"], task["name"], str(task["rounds"]), task["reason"], _words(task["metrics"]))
        figures.add_row(
            result["plan"],
            str(result["cycles"]),
            f"{result['seconds']:.2f}",
            str(result["samples"]),
            f"{result['idle_s']:.2f} s ({result['idle_part']:.1%})",
            f"{result['mismatch']:.3f}",
            f"{result['bytes'] / 1e6:.2f}",
        )
    console = Console()
    console.print(tasks)
    console.print(figures)
