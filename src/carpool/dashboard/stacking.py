"""Jobs on one device over time as blocks that never overlap: shares lie on top of each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from carpool.dashboard.window import Window
from carpool.service.views import SpanView


@dataclass(frozen=True, slots=True)
class Block:
    """A job on a stretch of a row: left and right in parts of the window, top and bottom in parts of the row."""

    job: str
    left: float
    right: float
    top: float
    bottom: float
    fraction: float  # as it was given, also where the device is overbooked


def stack(spans: Sequence[SpanView], window: Window, now: float) -> list[Block]:
    """The blocks of one device, in order of time; what is not over reaches to `now`.

    Between two instants at which somebody comes or goes, whoever is there lies on whoever came before, each as high as
    its fraction, all of them scaled down where the fractions sum past 1.
    """
    inside = [
        (window.place(span.since), window.place(now if span.until is None else span.until), span) for span in spans
    ]
    inside = sorted(
        [each for each in inside if each[0] < each[1] and each[2].fraction > 0.0],
        key=lambda each: (each[2].since, each[2].job),
    )
    edges = sorted({edge for left, right, _ in inside for edge in (left, right)})
    blocks: list[Block] = []
    open_: dict[int, Block] = {}  # by place in `inside`: those that reach to the present edge
    coming, present = 0, list[int]()
    for left, right in pairwise(edges):
        while coming < len(inside) and inside[coming][0] <= left:
            present.append(coming)
            coming += 1
        present = [place for place in present if inside[place][1] > left]
        total = max(1.0, sum(inside[place][2].fraction for place in present))
        top, reaching = 0.0, dict[int, Block]()
        for place in present:
            span = inside[place][2]
            bottom = min(1.0, top + span.fraction / total)
            before = open_.get(place)
            if before is not None and (before.top, before.bottom) == (top, bottom):
                reaching[place] = Block(span.job, before.left, right, top, bottom, span.fraction)
            else:
                if before is not None:
                    blocks.append(before)
                reaching[place] = Block(span.job, left, right, top, bottom, span.fraction)
            top = bottom
        blocks += [block for place, block in open_.items() if place not in reaching]
        open_ = reaching
    return sorted([*blocks, *open_.values()], key=lambda block: (block.left, block.top))
