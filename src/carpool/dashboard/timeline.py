"""Cluster timeline: job blocks in a row for each device, or for each node of a large cluster."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import tzinfo
from itertools import groupby, pairwise

from carpool.dashboard.text_format import colour
from carpool.dashboard.time_window import Tick, TimeWindow
from carpool.service.queries.views import DeviceView, ForeignProcessView, ResidentView, SpanView


@dataclass(frozen=True, slots=True)
class Block:
    """A job on a stretch of a row: left and right in parts of the window, top and bottom in parts of the row."""

    job: str
    left: float
    right: float
    top: float
    bottom: float
    fraction: float  # as it was given, also where the device is overbooked


def stack_blocks(spans: Sequence[SpanView], window: TimeWindow, now: float) -> list[Block]:
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


MOST_ROWS = 40  # devices that have a row of their own; beyond, a node has one
FINEST = 1 / 1500  # of the window: what is shorter is not seen, and not drawn
BINS = 180  # of the curve of utilisation

_LABELLED = 0.03  # of the window: a shorter block has no room for a name


@dataclass(frozen=True, slots=True)
class RowShape:
    """All that one job has of a condensed row, as one path in a box of 1000 × 100."""

    job: str
    colour: str
    path: str


@dataclass(frozen=True, slots=True)
class Bar:
    """A block that is drawn by itself; places in per cent."""

    job: str
    colour: str
    x: str
    y: str
    width: str
    height: str
    is_labelled: bool
    words: str


@dataclass(frozen=True, slots=True)
class TimelineRow:
    """A device, or a node with all its devices, over time and now."""

    name: str
    node: str
    kind: str
    num_devices: int
    num_lost: int
    held: float  # devices, each by the fractions given away, at most 1
    residents: tuple[ResidentView, ...]  # now, each job once
    memory_bytes: int  # there is
    claimed_bytes: int  # by residents that say what they need
    outsiders: tuple[ForeignProcessView, ...] = ()
    bars: tuple[Bar, ...] = ()
    shapes: tuple[RowShape, ...] = ()

    @property
    def held_part(self) -> float:
        """Of its devices."""
        return self.held / self.num_devices

    @property
    def claimed_part(self) -> float | None:
        """Of its memory, where that is known."""
        return None if not self.memory_bytes else min(1.0, self.claimed_bytes / self.memory_bytes)


@dataclass(frozen=True, slots=True)
class Timeline:
    """A timeline, ready to be written down."""

    window: TimeWindow
    now: float
    ticks: tuple[Tick, ...]
    groups: tuple[tuple[str, tuple[TimelineRow, ...]], ...]  # by kind where rows are nodes, else by node
    is_condensed: bool
    node: str  # whose devices alone are shown; empty: everybody's
    nodes: int
    devices: int
    utilisation: tuple[float, ...]  # in equal bins
    num_left_out: int  # blocks too short to be seen

    @property
    def mean_utilisation(self) -> float:
        """Over the window."""
        return sum(self.utilisation) / len(self.utilisation) if self.utilisation else 0.0

    @property
    def area(self) -> str:
        """The curve of utilisation as a path in a box of 1000 × 100."""
        wide = 1000 / len(self.utilisation)
        steps = "".join(
            f"L{place * wide:.1f} {y:.1f}H{(place + 1) * wide:.1f}" for place, y in enumerate(self._heights())
        )
        return f"M0 100{steps}V100Z"

    def _heights(self) -> Iterable[float]:
        return (100 - 100 * part for part in self.utilisation)


def draw_timeline(
    devices: Sequence[DeviceView],
    spans: Iterable[SpanView],
    window: TimeWindow,
    now: float,
    zone: tzinfo,
    node: str = "",
) -> Timeline:
    """Draw what devices did in a window; with `node`, only that node's, one by one."""
    shown = [device for device in devices if not node or device.node == node]
    by_device: dict[int, list[SpanView]] = {device.id: [] for device in shown}
    for span in spans:
        if span.device in by_device:
            by_device[span.device].append(span)
    stacks = {device: stack_blocks(of_device, window, now) for device, of_device in by_device.items()}
    is_condensed = len(shown) > MOST_ROWS and not node
    left_out = sum(block.right - block.left < FINEST for blocks in stacks.values() for block in blocks)
    rows = _node_rows(shown, stacks) if is_condensed else _device_rows(shown, stacks)
    keyed = [((row.kind if is_condensed else row.node), row) for row in rows]
    return Timeline(
        window=window,
        now=now,
        ticks=tuple(window.ticks(zone)),
        groups=tuple((key, tuple(row for _, row in group)) for key, group in groupby(keyed, key=lambda each: each[0])),
        is_condensed=is_condensed,
        node=node,
        nodes=len({device.node for device in shown}),
        devices=len(shown),
        utilisation=_utilisation(stacks.values(), len(shown)),
        num_left_out=left_out,
    )


def _device_rows(devices: Sequence[DeviceView], stacks: Mapping[int, list[Block]]) -> list[TimelineRow]:
    return [
        replace(
            _row(device.name, [device]),
            bars=tuple(_bar(block) for block in stacks[device.id] if block.right - block.left >= FINEST),
        )
        for device in devices
    ]


def _bar(block: Block) -> Bar:
    wide = block.right - block.left
    share = "" if block.fraction == 1.0 else f" {block.fraction:.0%}"
    return Bar(
        block.job,
        colour(block.job),
        f"{100 * block.left:.3f}%",
        f"{100 * block.top:.2f}%",
        f"{100 * wide:.3f}%",
        f"{100 * (block.bottom - block.top):.2f}%",
        wide >= _LABELLED and block.bottom - block.top >= 0.45,
        (block.job or "somebody else") + share,
    )


def _node_rows(devices: Sequence[DeviceView], stacks: Mapping[int, list[Block]]) -> list[TimelineRow]:
    rows = []
    for name, group in groupby(devices, key=lambda device: device.node):
        inside = list(group)
        rows.append(replace(_row(name, inside), shapes=_shapes([stacks[device.id] for device in inside])))
    return rows


def _shapes(stacks: Sequence[Sequence[Block]]) -> tuple[RowShape, ...]:
    """Devices of a node as strips of one row; what a job has of neighbouring whole devices is one rectangle."""
    high = 100 / len(stacks)
    paths: dict[str, list[str]] = {}
    open_: dict[tuple[str, float, float], int] = {}  # whole blocks on the strip before: where they begin
    for place, blocks in enumerate([*stacks, []]):
        whole: dict[tuple[str, float, float], int] = {}
        for block in blocks:
            if block.right - block.left < FINEST:
                continue
            key = (block.job, block.left, block.right)
            if (block.top, block.bottom) == (0.0, 1.0):
                whole[key] = open_.get(key, place)
            else:
                paths.setdefault(block.job, []).append(
                    _rectangle(block.left, block.right, (place + block.top) * high, (place + block.bottom) * high)
                )
        for key, began in open_.items():
            if key not in whole:
                paths.setdefault(key[0], []).append(_rectangle(key[1], key[2], began * high, place * high))
        open_ = whole
    return tuple(RowShape(job, colour(job), "".join(path)) for job, path in paths.items())


def _rectangle(left: float, right: float, top: float, bottom: float) -> str:
    wide, high = 1000 * (right - left), bottom - top
    return f"M{1000 * left:.1f} {top:.1f}h{wide:.1f}v{high:.1f}h{-wide:.1f}z"


def _row(name: str, devices: Sequence[DeviceView]) -> TimelineRow:
    residents: dict[str, ResidentView] = {}
    for device in devices:
        for resident in device.residents:
            residents.setdefault(resident.job, resident)
    return TimelineRow(
        name=name,
        node=devices[0].node,
        kind=devices[0].kind,
        num_devices=len(devices),
        num_lost=sum(device.is_lost for device in devices),
        held=sum(min(1.0, sum(each.fraction for each in device.residents)) for device in devices),
        residents=tuple(residents.values()),
        memory_bytes=sum(device.memory_bytes for device in devices),
        claimed_bytes=sum(each.memory_bytes for device in devices for each in device.residents),
        outsiders=tuple(each for device in devices for each in device.outsiders),
    )


def _utilisation(stacks: Iterable[Sequence[Block]], num_devices: int) -> tuple[float, ...]:
    """Part of all devices held, in each of `BINS` equal bins: every block spread over the bins it touches."""
    held = [0.0] * BINS
    for blocks in stacks:
        for block in blocks:
            left, right, high = block.left * BINS, block.right * BINS, block.bottom - block.top
            first, last = min(BINS - 1, int(left)), min(BINS - 1, int(right))
            if first == last:
                held[first] += high * (right - left)
                continue
            held[first] += high * (first + 1 - left)
            held[last] += high * (right - last)
            for place in range(first + 1, last):
                held[place] += high
    return tuple(min(1.0, each / max(1, num_devices)) for each in held)
