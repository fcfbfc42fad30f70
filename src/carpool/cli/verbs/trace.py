"""``carpool trace``: generate, inspect and convert traces, and report dropped rows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import click

from carpool.cli.support.json_output import json_option

if TYPE_CHECKING:
    from carpool.sim.traces.trace import DroppedRow


_MAX_LISTED = 5  # of one reason


def dropped_row_lines(dropped: Mapping[str, int], rows: Sequence[DroppedRow]) -> Iterator[str]:
    """One line for every reason: how many rows, and the first of those that are known."""
    for reason, count in dropped.items():
        known = [f"row {row.row}" if row.row else f"job {row.job}" for row in rows if row.reason == reason][
            :_MAX_LISTED
        ]
        more = ", …" if len(known) < count else ""
        yield f"dropped {count} row{'s' if count != 1 else ''}: {reason}" + (
            f" ({', '.join(known)}{more})" if known else ""
        )


_EPILOG = "Example: carpool trace info philly.csv"


@click.group("trace", epilog=_EPILOG)
def trace() -> None:
    """Make, inspect and convert traces."""


_GENERATE_EPILOG = """\b
Examples:
  carpool trace generate day.csv --jobs 2000 --devices 64 --load 0.9
  carpool trace generate big.csv --jobs 1000000 --devices 100000 --load 0.8 --lengths lognormal:median_s=600:sigma=1.5
  carpool trace generate mix.csv --sizes 1:0.7,2:0.2,4:0.1 --models resnet50:2,bert:1 --weights 1-5 --arrivals diurnal
"""


@trace.command(epilog=_GENERATE_EPILOG)
@click.argument("path")
@click.option("--jobs", type=int, default=1000, show_default=True, help="How many.")
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed gives the same trace.")
@click.option("--devices", type=int, default=64, show_default=True, help="What --load is measured against.")
@click.option(
    "--load",
    type=float,
    default=None,
    help="Offered load on --devices; 1.0 is what they can just serve. [default: 0.8]",
)
@click.option("--rate", type=float, default=None, metavar="PER_S", help="Jobs per second, instead of --load.")
@click.option(
    "--span", type=float, default=None, metavar="S", help="Seconds from first to last submission, instead of --load."
)
@click.option(
    "--arrivals",
    default="poisson",
    show_default=True,
    help="poisson, at-once, uniform, diurnal, bursty, with :key=value.",
)
@click.option("--sizes", default="philly", show_default=True, help="Devices per job with shares, such as 1:0.7,4:0.3.")
@click.option(
    "--lengths", default="philly", show_default=True, help="philly, lognormal, exponential, fixed, with :key=value."
)
@click.option("--models", default="", help="Models with shares, such as resnet50:2,bert:1.")
@click.option("--weights", default="", help="Weights, such as 1-5 or 1:0.9,5:0.1. [default: all 1]")
@click.option("--users", type=int, default=0, help="Number of users, the k-th submitting in proportion to 1/k.")
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
    """Write a made-up trace to PATH (.gz packs it)."""
    from carpool.sim.traces import generator as make
    from carpool.sim.traces.summary import lines, summarise
    from carpool.sim.traces.writer import write_trace

    recipe = make.TraceGenerator(
        jobs=jobs,
        seed=seed,
        arrivals=make.parse_arrivals(arrivals),
        rate_per_s=rate,
        span_s=span,
        load=load,
        devices=devices,
        sizes=make.parse_sizes(sizes),
        lengths=make.parse_lengths(lengths),
        models=make.parse_mix(models) if models else (),
        weights=make.parse_weights(weights) if weights else (),
        users=users,
    )
    trace = recipe.generate(path)
    write_trace(trace, path)
    for line in lines(summarise(trace, devices)):
        click.echo(line, err=True)


@trace.command(epilog="Example: carpool trace info philly.csv --devices 512")
@click.argument("path")
@click.option("--format", "format_", default=None, metavar="NAME", help="Where it is not recognised from the header.")
@click.option("--devices", type=click.IntRange(min=1), default=None, help="Tell the load offered to so many devices.")
@click.option("--skip-invalid", is_flag=True, help="Drop bad rows, count and list them, instead of stopping.")
@json_option
def info(path: str, format_: str | None, devices: int | None, skip_invalid: bool, as_json: bool) -> None:
    """Tell what is in a trace, and what was left out of it and why."""
    from carpool.sim.traces.reader import read_trace
    from carpool.sim.traces.summary import lines, summarise

    trace = read_trace(path, format_, skip_invalid=skip_invalid)
    found = summarise(trace, devices)
    if as_json:
        click.echo(json.dumps(found.as_json()))
        return
    for line in lines(found):
        click.echo(line)


@trace.command(epilog="Example: carpool trace convert cluster_log.csv helios.csv")
@click.argument("source")
@click.argument("target")
@click.option("--format", "format_", default=None, metavar="NAME", help="Of SOURCE, where it is not recognised.")
@click.option("--skip-invalid", is_flag=True, help="Drop bad rows, count and list them, instead of stopping.")
def convert(source: str, target: str, format_: str | None, skip_invalid: bool) -> None:
    """Write SOURCE to TARGET as canonical CSV."""
    from carpool.sim.traces.writer import convert as rewrite

    trace = rewrite(source, target, format_, skip_invalid=skip_invalid)
    for words in dropped_row_lines(trace.dropped, trace.dropped_rows):
        click.echo(f"carpool: {words}", err=True)
    click.echo(f"wrote {len(trace)} jobs to {target}", err=True)
