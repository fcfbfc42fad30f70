"""Line charts: SVG paths and axis ticks over time or steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, floor, isfinite, log10

from carpool.dashboard.text_format import exact_duration, plain
from carpool.dashboard.time_window import STEPS_S, Tick

MAX_POINTS = 300  # per curve: more cannot be distinguished

_LOG_S = (1, 10, 60, 600, 3600, 6 * 3600, 86400, 864000)
_LOG = tuple(10**power for power in range(13))

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Curve:
    """SVG path in a box of 1000 × 100, and the coordinates of its points for the tooltip."""

    name: str
    path: str
    xs: str
    ys: str


@dataclass(frozen=True, slots=True)
class Chart:
    """Curves with the ticks of both axes; tick positions are fractions from the left and from the bottom."""

    curves: tuple[Curve, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]

    def __bool__(self) -> bool:
        return bool(self.curves)


def chart(
    lines: Sequence[tuple[str, Sequence[Point]]],
    *,
    over_time: bool = False,
    is_log: bool = False,
    until: float | None = None,
    from_zero: bool = False,
    stepwise: bool = False,
) -> Chart:
    """Draw the lines that have finite points.

    `over_time`: x is in seconds. `is_log`: logarithmic x axis from 1. `until`: the x axis spans at least 0 to this.
    `stepwise`: each value holds until the next.
    """
    scale: Callable[[float], float] = (lambda x: log10(max(1.0, x))) if is_log else float
    series = [(name, [(scale(x), y) for x, y in points if isfinite(x) and isfinite(y)]) for name, points in lines]
    series = [(name, points) for name, points in series if points]
    if not series:
        return Chart((), (), ())
    xs = [x for _, points in series for x, _ in points]
    ys = [y for _, points in series for _, y in points]
    left, right = (min(xs), max(xs)) if until is None else (min(0.0, *xs), max(until, *xs))
    low, high = (min(0.0, *ys) if from_zero else min(ys)), max(ys)
    y_values = round_ticks(low, high, 4)
    low, high = min(low, y_values[0]), max(high, y_values[-1])
    width, height = (right - left) or 1.0, (high - low) or 1.0

    def place(point: Point) -> Point:
        return 1000 * (point[0] - left) / width, 100 - 100 * (point[1] - low) / height

    if is_log:
        x_values = [float(x) for x in (_LOG_S if over_time else _LOG)]
    else:
        x_values = time_ticks(left, right, 5) if over_time else round_ticks(left, right, 5)
    label = exact_duration if over_time else plain
    return Chart(
        tuple(_curve(name, thin(points), place, stepwise=stepwise) for name, points in series),
        tuple(Tick((scale(x) - left) / width, label(x)) for x in x_values if left <= scale(x) <= right),
        tuple(Tick((y - low) / height, plain(y)) for y in y_values),
    )


def _curve(name: str, points: Sequence[Point], place: Callable[[Point], Point], *, stepwise: bool) -> Curve:
    placed = [place(point) for point in points]
    x, y = placed[0]
    path = [f"M{x:.1f} {y:.2f}"]
    for x, y in placed[1:]:
        path.append(f"H{x:.1f}V{y:.2f}" if stepwise else f"L{x:.1f} {y:.2f}")
    if len(placed) == 1:
        path.append("h.1")  # the round line cap makes it a dot
    return Curve(
        name,
        "".join(path),
        " ".join(f"{x:.6g}" for x, _ in points),
        " ".join(f"{y:.4g}" for _, y in points),
    )


def thin(points: Sequence[Point], limit: int = MAX_POINTS) -> Sequence[Point]:
    """Keep every n-th point, at most `limit`, always including the last."""
    every = max(1, ceil(len(points) / limit))
    return points[(len(points) - 1) % every :: every]


def round_ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` numbers spaced by 1, 2 or 5 times 10ⁿ that enclose `low` and `high`."""
    if not high > low:
        spread = abs(low) / 2 or 1.0
        low, high = low - spread, high + spread
    rough = (high - low) / count
    power = 10.0 ** floor(log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first, last = floor(low / step + 1e-9), ceil(high / step - 1e-9)
    return [float(f"{number * step:.12g}") for number in range(first, last + 1)]


def time_ticks(low: float, high: float, limit: int) -> list[float]:
    """Round durations between `low` and `high`, at most `limit` + 1."""
    step = next((step for step in STEPS_S if (high - low) / step <= limit), None)
    if step is None or high - low < limit:
        return round_ticks(low, high, limit)
    return [float(number * step) for number in range(ceil(low / step), floor(high / step) + 1)]
