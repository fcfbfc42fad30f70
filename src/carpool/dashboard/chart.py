"""Line charts: SVG paths and axis ticks over time or steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, floor, isfinite, log10

from carpool.dashboard.text_format import duration, plain
from carpool.dashboard.time_window import STEPS_S, Tick

POINTS = 300  # of a curve: more cannot be told apart

_LOG_S = (1, 10, 60, 600, 3600, 6 * 3600, 86400, 864000)
_LOG = tuple(10**power for power in range(13))

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Curve:
    """One line in a box of 1000 × 100, and the points it goes through, for whoever points at it."""

    name: str
    path: str
    xs: str
    ys: str


@dataclass(frozen=True, slots=True)
class Chart:
    """Curves with their axes; marks in parts of each axis, from the left and from the bottom."""

    curves: tuple[Curve, ...]
    across: tuple[Tick, ...]
    up: tuple[Tick, ...]

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
    """Draw lines that have points.

    `over_time`: across are seconds. `is_log`: on a logarithmic axis, from 1 on. `until`: the axis goes from 0 to there,
    whatever the points. `stepwise`: each value holds until the next.
    """
    scale: Callable[[float], float] = (lambda x: log10(max(1.0, x))) if is_log else float
    kept = [(name, [(scale(x), y) for x, y in _finite(points)]) for name, points in lines]
    kept = [(name, points) for name, points in kept if points]
    if not kept:
        return Chart((), (), ())
    xs = [x for _, points in kept for x, _ in points]
    ys = [y for _, points in kept for _, y in points]
    left, right = (min(xs), max(xs)) if until is None else (min(0.0, *xs), max(until, *xs))
    low, high = (min(0.0, *ys) if from_zero else min(ys)), max(ys)
    up = round_marks(low, high, 4)
    low, high = min(low, up[0]), max(high, up[-1])
    wide, tall = (right - left) or 1.0, (high - low) or 1.0

    def place(point: Point) -> Point:
        return 1000 * (point[0] - left) / wide, 100 - 100 * (point[1] - low) / tall

    if is_log:
        across = [float(x) for x in (_LOG_S if over_time else _LOG)]
    else:
        across = time_marks(left, right, 5) if over_time else round_marks(left, right, 5)
    words = duration if over_time else plain
    return Chart(
        tuple(_curve(name, thin(points), place, stepwise=stepwise) for name, points in kept),
        tuple(Tick((scale(x) - left) / wide, words(x)) for x in across if left <= scale(x) <= right),
        tuple(Tick((y - low) / tall, plain(y)) for y in up),
    )


def _curve(name: str, points: Sequence[Point], place: Callable[[Point], Point], *, stepwise: bool) -> Curve:
    placed = [place(point) for point in points]
    x, y = placed[0]
    path = [f"M{x:.1f} {y:.2f}"]
    for x, y in placed[1:]:
        path.append(f"H{x:.1f}V{y:.2f}" if stepwise else f"L{x:.1f} {y:.2f}")
    if len(placed) == 1:
        path.append("h.1")  # a round end makes it a dot
    return Curve(
        name,
        "".join(path),
        " ".join(f"{x:.6g}" for x, _ in points),
        " ".join(f"{y:.4g}" for _, y in points),
    )


def thin(points: Sequence[Point], most: int = POINTS) -> Sequence[Point]:
    """Every so many-th point, so that at most `most` remain; the last is always there."""
    every = max(1, ceil(len(points) / most))
    return points[(len(points) - 1) % every :: every]


def round_marks(low: float, high: float, about: int) -> list[float]:
    """Round numbers, about so many, 1, 2 or 5 times 10ⁿ apart; `low` and `high` are between the first and the last."""
    if not high > low:
        spread = abs(low) / 2 or 1.0
        low, high = low - spread, high + spread
    rough = (high - low) / about
    power = 10.0 ** floor(log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first, last = floor(low / step + 1e-9), ceil(high / step - 1e-9)
    return [float(f"{place * step:.12g}") for place in range(first, last + 1)]


def time_marks(low: float, high: float, most: int) -> list[float]:
    """Round lengths of time between two, at most so many and one more."""
    step = next((step for step in STEPS_S if (high - low) / step <= most), None)
    if step is None or high - low < most:
        return round_marks(low, high, most)
    return [float(place * step) for place in range(ceil(low / step), floor(high / step) + 1)]


def _finite(points: Sequence[Point]) -> list[Point]:
    return [(x, y) for x, y in points if isfinite(x) and isfinite(y)]
