"""``carpool trace``: generate, inspect and convert traces, and report dropped rows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from carpool.cli.support.options import json_option, print_note

if TYPE_CHECKING:
    from carpool.sim.traces.trace import DroppedRow


format_option = click.option("--format", "format", metavar="NAME", help="Format of the trace, if it is not detected.")
skip_invalid_option = click.option(
    "--skip-invalid", is_flag=True, help="Skip and report invalid rows instead of stopping at the first."
)
_MAX_LISTED = 5  # rows named per reason


def dropped_row_lines(dropped: Mapping[str, int], rows: Sequence[DroppedRow]) -> Iterator[str]:
    """Yield one line per reason: the number of dropped rows, and the first few of them."""
    for reason, count in dropped.items():
        named = [f"row {row.row}" if row.row else f"job {row.job}" for row in rows if row.reason == reason]
        listed = ", ".join(named[:_MAX_LISTED]) + (", …" if min(len(named), _MAX_LISTED) < count else "")
        yield f"dropped {count} row{'s' if count != 1 else ''}: {reason}" + (f" ({listed})" if named else "")


@click.group("trace", epilog="Example: carpool trace info philly.csv")
def trace() -> None:
    """Generate, inspect and convert traces of jobs."""


_GENERATE_EPILOG = """\b
Examples:
  carpool trace generate day.csv --jobs 2000 --devices 64 --load 0.9
  carpool trace generate big.csv --jobs 1000000 --devices 100000 --load 0.8 --lengths lognormal:median_s=600:sigma=1.5
  carpool trace generate mix.csv --sizes 1:0.7,2:0.2,4:0.1 --models resnet50:2,bert:1 --weights 1-5 --arrivals diurnal
"""


@trace.command(epilog=_GENERATE_EPILOG)
@click.argument("path")
@click.option("--jobs", type=int, default=1000, show_default=True, help="Number of jobs.")
@click.option("--seed", type=int, default=0, show_default=True, help="Random seed; the same seed gives the same trace.")
@click.option("--devices", type=int, default=64, show_default=True, help="Number of devices that --load refers to.")
@click.option(
    "--load",
    type=float,
    default=None,
    help="Offered load on --devices; at 1.0 they are just saturated. [default: 0.8]",
)
@click.option(
    "--rate", type=float, default=None, metavar="PER_S", help="Arrival rate in jobs per second, instead of --load."
)
@click.option(
    "--span", type=float, default=None, metavar="S", help="Seconds from first to last submission, instead of --load."
)
@click.option(
    "--arrivals",
    default="poisson",
    show_default=True,
    help="Arrival process: poisson, at-once, uniform, diurnal or bursty, with parameters as :key=value.",
)
@click.option(
    "--sizes", default="philly", show_default=True, help="Devices per job with probabilities, such as 1:0.7,4:0.3."
)
@click.option(
    "--lengths",
    default="philly",
    show_default=True,
    help="Job lengths: philly, lognormal, exponential or fixed, with parameters as :key=value.",
)
@click.option("--models", default="", help="Models with frequencies, such as resnet50:2,bert:1. [default: none]")
@click.option("--weights", default="", help="Job weights, such as 1-5 or 1:0.9,5:0.1. [default: all 1]")
@click.option(
    "--users", type=int, default=0, help="Number of users; user k submits in proportion to 1/k. [default: none]"
)
def generate(
    path: str,
    jobs: int,
    seed: int,
    devices: int,
    load: float | None,
    rate: float | None,
    span: float | None,
    arrivals: str,
    sizes: str,
    lengths: str,
    models: str,
    weights: str,
    users: int,
) -> None:
    """Generate a synthetic trace and write it to PATH, compressed if it ends in .gz."""
    from carpool.sim.traces import generator
    from carpool.sim.traces.summary import lines, summarise
    from carpool.sim.traces.writer import write_trace

    trace = generator.TraceGenerator(
        jobs=jobs,
        seed=seed,
        arrivals=generator.parse_arrivals(arrivals),
        rate_per_s=rate,
        span_s=span,
        load=load,
        devices=devices,
        sizes=generator.parse_sizes(sizes),
        lengths=generator.parse_lengths(lengths),
        models=generator.parse_mix(models) if models else (),
        weights=generator.parse_weights(weights) if weights else (),
        users=users,
    ).generate(path)
    write_trace(trace, path)
    for line in lines(summarise(trace, devices)):
        click.echo(line, err=True)


@trace.command(epilog="Example: carpool trace info philly.csv --devices 512")
@click.argument("path")
@format_option
@click.option(
    "--devices", type=click.IntRange(min=1), default=None, help="Also print the load offered to this many devices."
)
@skip_invalid_option
@json_option
def info(path: str, devices: int | None, as_json: bool, **reading: Any) -> None:
    """Summarise a trace: jobs, sizes, lengths, and dropped rows with the reasons."""
    from carpool.sim.traces.reader import read_trace
    from carpool.sim.traces.summary import lines, summarise

    trace = read_trace(path, **reading)
    summary = summarise(trace, devices)
    if as_json:
        click.echo(json.dumps(summary.as_json()))
        return
    for line in lines(summary):
        click.echo(line)


@trace.command(epilog="Example: carpool trace convert cluster_log.csv helios.csv")
@click.argument("source")
@click.argument("target")
@format_option
@skip_invalid_option
def convert(source: str, target: str, **reading: Any) -> None:
    """Convert SOURCE to the canonical CSV format and write it to TARGET."""
    from carpool.sim.traces.writer import convert as convert_trace

    trace = convert_trace(source, target, **reading)
    for line in dropped_row_lines(trace.dropped, trace.dropped_rows):
        print_note(line)
    click.echo(f"wrote {len(trace)} jobs to {target}", err=True)
