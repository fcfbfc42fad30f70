"""Table of a profile's measurements, and the conclusions drawn from them."""

from __future__ import annotations

from math import ceil

import click
from rich.console import Console
from rich.table import Table

from carpool.predictors.profiles.profile import Measurement, Profile

_WIDTH = 110
_MIB = 1 << 20


def print_profile(profile: Profile) -> None:
    """Print the table and the conclusions."""
    console = Console()
    console.width = max(console.width, _WIDTH)
    console.print(_table(profile))
    for line in conclusions(profile):
        click.echo(line)


def _table(profile: Profile) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("setting", "batch", "step", "samples/s", "memory", "reserved", "busy", "memory busy", "copied in"):
        table.add_column(heading, justify="left" if heading == "setting" else "right", no_wrap=True)
    for each in profile.measurements:
        table.add_row(*row(each), style="red" if each.error else "")
    return table


def row(each: Measurement) -> tuple[str, ...]:
    """Cells of a measurement: a dash for what cannot be measured, the error for a failed setting."""
    setting = f"{each.devices} × {each.kind}" if each.devices > 1 else each.kind
    setting += f" at {each.share:.0%}" if each.share < 1.0 else ""
    setting += " exact" if each.exact else ""
    setting += f" with {each.beside}" if each.beside else ""
    if each.error:
        return setting, str(each.batch_size), "out of memory" if each.out_of_memory else each.error[:60]
    return (
        setting,
        str(each.batch_size),
        "–" if each.step_s is None else f"{each.step_s * 1e3:.1f} ms",
        "–" if each.samples_per_s is None else f"{each.samples_per_s:.0f}",
        "–" if each.peak_bytes is None else f"{each.peak_bytes / _MIB:.0f} MiB",
        "–" if each.held_bytes is None else f"{each.held_bytes / _MIB:.0f} MiB",
        "–" if each.device_use is None else f"{each.device_use:.0%}",
        "–" if each.bandwidth_use is None else f"{each.bandwidth_use:.0%}",
        "–" if each.host_to_device_bytes is None else f"{each.host_to_device_bytes / 1024:.0f} KiB",
    )


def conclusions(profile: Profile) -> list[str]:
    """Fitted step time and memory use per device type, limits, and gradient noise."""
    lines = []
    for kind in profile.kinds:
        step, memory, held = profile.step_time(kind), profile.memory(kind), profile.held(kind)
        if step is not None:
            fit = f"a step takes {step.fixed_s_ * 1e3:.2f} ms + {step.per_sample_s_ * 1e3:.4f} ms per sample"
            lines.append(f"{kind}: {fit} (± {step.error_:.0%})")
        if memory is not None and held is not None:
            least, more = memory.predict(0).mean, memory.predict(profile.batch_size).mean
            fit = f"memory {least / _MIB:.0f} MiB without a batch, {more / _MIB:.0f} MiB at batch {profile.batch_size}"
            lines.append(f"{kind}: {fit} (± {memory.error_:.1%})")
            bound = held.bound(profile.batch_size)
            lines.append(
                f'{kind}: memory = "{ceil(bound / _MIB)}MiB" suffices (allocator overhead, {held.margin_:.0%} margin)'
            )
        limit = profile.memory_limit(kind)
        if limit is not None:
            lines.append(f"{kind}: batch {limit} does not fit")
        price = profile.exact_price(kind)
        if price is not None:
            lines.append(f"{kind}: exact = true multiplies the step time by {price:.2f}")
    noise = profile.noise
    if noise is not None and noise.scale is not None:
        spread = "" if noise.spread is None else f" ± {noise.spread:.0f}"
        lines.append(f"gradient noise scale {noise.scale:.0f}{spread} samples in the first {noise.steps} steps")
    return lines
