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
    """Allocation of a job: left and right as fractions of the window, top and bottom of the row."""

    job: str
    left: float
    right: float
    top: float
    bottom: float
    fraction: float  # as allocated, even if the device is overbooked


def stack_blocks(spans: Sequence[SpanView], window: TimeWindow, now: float) -> list[Block]:
    """Stack the allocations of one device into blocks, in order of time; open ones reach to `now`.

    Between two changes, blocks are stacked in order of arrival, each as high as its fraction, scaled down if the
    fractions sum to more than 1.
    """
    inside = [
        (window.position(span.since), window.position(now if span.until is None else span.until), span)
        for span in spans
    ]
    inside = sorted(
        [each for each in inside if each[0] < each[1] and each[2].fraction > 0.0],
        key=lambda each: (each[2].since, each[2].job),
    )
    edges = sorted({edge for left, right, _ in inside for edge in (left, right)})
    blocks: list[Block] = []
    open_: dict[int, Block] = {}  # by index in `inside`: blocks that reach to the current edge
    upcoming, present = 0, list[int]()
    for left, right in pairwise(edges):
        while upcoming < len(inside) and inside[upcoming][0] <= left:
            present.append(upcoming)
            upcoming += 1
        present = [index for index in present if inside[index][1] > left]
        total = max(1.0, sum(inside[index][2].fraction for index in present))
        top, extended = 0.0, dict[int, Block]()
        for index in present:
            span = inside[index][2]
            bottom = min(1.0, top + span.fraction / total)
            previous = open_.get(index)
            if previous is not None and (previous.top, previous.bottom) == (top, bottom):
                extended[index] = Block(span.job, previous.left, right, top, bottom, span.fraction)
            else:
                if previous is not None:
                    blocks.append(previous)
                extended[index] = Block(span.job, left, right, top, bottom, span.fraction)
            top = bottom
        blocks += [block for index, block in open_.items() if index not in extended]
        open_ = extended
    return sorted([*blocks, *open_.values()], key=lambda block: (block.left, block.top))


MAX_DEVICE_ROWS = 40  # with more devices, each node has one row
MIN_WIDTH = 1 / 1500  # of the window: shorter blocks are not drawn
BINS = 180  # of the utilisation curve

_MIN_LABELLED = 0.03  # of the window: shorter blocks have no label


@dataclass(frozen=True, slots=True)
class RowShape:
    """All blocks of one job in a condensed row, as one path in a box of 1000 × 100."""

    job: str
    colour: str
    path: str


@dataclass(frozen=True, slots=True)
class Bar:
    """A block drawn by itself; coordinates in per cent."""

    job: str
    colour: str
    x: str
    y: str
    width: str
    height: str
    is_labelled: bool
    label: str


@dataclass(frozen=True, slots=True)
class TimelineRow:
    """A device, or a node with all its devices: current state and blocks over time."""

    name: str
    node: str
    kind: str
    num_devices: int
    num_lost: int
    allocated: float  # devices, each counted by its allocated fractions, at most 1
    residents: tuple[ResidentView, ...]  # now, each job once
    memory_bytes: int
    claimed_bytes: int  # by residents with a declared memory need
    foreign: tuple[ForeignProcessView, ...] = ()
    bars: tuple[Bar, ...] = ()
    shapes: tuple[RowShape, ...] = ()

    @property
    def allocated_fraction(self) -> float:
        return self.allocated / self.num_devices

    @property
    def claimed_fraction(self) -> float | None:
        """Claimed fraction of the memory; None if its size is unknown."""
        return None if not self.memory_bytes else min(1.0, self.claimed_bytes / self.memory_bytes)


@dataclass(frozen=True, slots=True)
class Timeline:
    """All rows, ticks and the utilisation curve of a timeline."""

    window: TimeWindow
    now: float
    ticks: tuple[Tick, ...]
    groups: tuple[tuple[str, tuple[TimelineRow, ...]], ...]  # by device type if rows are nodes, else by node
    is_condensed: bool
    node: str  # only this node is shown; empty: all
    nodes: int
    devices: int
    utilisation: tuple[float, ...]  # in equal bins
    num_hidden: int  # blocks too short to draw
    begins_at: float = 0.0  # when the daemon first started

    @property
    def mean_utilisation(self) -> float:
        """Mean over the part of the window that has passed and in which the daemon existed."""
        window = self.window
        part = self.observed_s / (window.until - window.since)
        return min(1.0, sum(self.utilisation) / len(self.utilisation) / part) if self.utilisation and part else 0.0

    @property
    def observed_s(self) -> float:
        """Seconds of the window in which the daemon existed."""
        return max(0.0, min(self.window.until, self.now) - max(self.window.since, self.begins_at))

    @property
    def area(self) -> str:
        """Utilisation curve as a path in a box of 1000 × 100."""
        width = 1000 / len(self.utilisation)
        steps = "".join(
            f"L{bin_ * width:.1f} {100 - 100 * fraction:.1f}H{(bin_ + 1) * width:.1f}"
            for bin_, fraction in enumerate(self.utilisation)
        )
        return f"M0 100{steps}V100Z"


def draw_timeline(
    devices: Sequence[DeviceView],
    spans: Iterable[SpanView],
    window: TimeWindow,
    now: float,
    zone: tzinfo,
    node: str = "",
    begins_at: float = 0.0,
) -> Timeline:
    """Draw the allocations of devices in a window; with `node`, only that node's, one row per device.

    Averages leave out the time before `begins_at`.
    """
    shown = [device for device in devices if not node or device.node == node]
    by_device: dict[int, list[SpanView]] = {device.id: [] for device in shown}
    for span in spans:
        if span.device in by_device:
            by_device[span.device].append(span)
    stacks = {device: stack_blocks(of_device, window, now) for device, of_device in by_device.items()}
    is_condensed = len(shown) > MAX_DEVICE_ROWS and not node
    num_hidden = sum(block.right - block.left < MIN_WIDTH for blocks in stacks.values() for block in blocks)
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
        num_hidden=num_hidden,
        begins_at=begins_at,
    )


def _device_rows(devices: Sequence[DeviceView], stacks: Mapping[int, list[Block]]) -> list[TimelineRow]:
    return [
        replace(
            _row(device.name, [device]),
            bars=tuple(_bar(block) for block in stacks[device.id] if block.right - block.left >= MIN_WIDTH),
        )
        for device in devices
    ]


def _bar(block: Block) -> Bar:
    width = block.right - block.left
    share = "" if block.fraction == 1.0 else f" {block.fraction:.0%}"
    return Bar(
        block.job,
        colour(block.job),
        f"{100 * block.left:.3f}%",
        f"{100 * block.top:.2f}%",
        f"{100 * width:.3f}%",
        f"{100 * (block.bottom - block.top):.2f}%",
        width >= _MIN_LABELLED and block.bottom - block.top >= 0.45,
        (block.job or "another user") + share,
    )


def _node_rows(devices: Sequence[DeviceView], stacks: Mapping[int, list[Block]]) -> list[TimelineRow]:
    rows = []
    for name, group in groupby(devices, key=lambda device: device.node):
        inside = list(group)
        rows.append(replace(_row(name, inside), shapes=_shapes([stacks[device.id] for device in inside])))
    return rows


def _shapes(stacks: Sequence[Sequence[Block]]) -> tuple[RowShape, ...]:
    """Draw the devices of a node as strips of one row, merging a job's whole neighbouring devices."""
    height = 100 / len(stacks)
    paths: dict[str, list[str]] = {}
    open_: dict[tuple[str, float, float], int] = {}  # whole-device blocks up to the previous strip -> first strip
    for strip, blocks in enumerate([*stacks, []]):
        whole: dict[tuple[str, float, float], int] = {}
        for block in blocks:
            if block.right - block.left < MIN_WIDTH:
                continue
            key = (block.job, block.left, block.right)
            if (block.top, block.bottom) == (0.0, 1.0):
                whole[key] = open_.get(key, strip)
            else:
                paths.setdefault(block.job, []).append(
                    _rectangle(block.left, block.right, (strip + block.top) * height, (strip + block.bottom) * height)
                )
        for key, first in open_.items():
            if key not in whole:
                paths.setdefault(key[0], []).append(_rectangle(key[1], key[2], first * height, strip * height))
        open_ = whole
    return tuple(RowShape(job, colour(job), "".join(path)) for job, path in paths.items())


def _rectangle(left: float, right: float, top: float, bottom: float) -> str:
    width, height = 1000 * (right - left), bottom - top
    return f"M{1000 * left:.1f} {top:.1f}h{width:.1f}v{height:.1f}h{-width:.1f}z"


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
        allocated=sum(min(1.0, sum(each.fraction for each in device.residents)) for device in devices),
        residents=tuple(residents.values()),
        memory_bytes=sum(device.memory_bytes for device in devices),
        claimed_bytes=sum(each.memory_bytes for device in devices for each in device.residents),
        foreign=tuple(each for device in devices for each in device.outsiders),
    )


def _utilisation(stacks: Iterable[Sequence[Block]], num_devices: int) -> tuple[float, ...]:
    allocated = [0.0] * BINS
    for blocks in stacks:
        for block in blocks:
            left, right, height = block.left * BINS, block.right * BINS, block.bottom - block.top
            first, last = min(BINS - 1, int(left)), min(BINS - 1, int(right))
            if first == last:
                allocated[first] += height * (right - left)
                continue
            allocated[first] += height * (first + 1 - left)
            allocated[last] += height * (right - last)
            for between in range(first + 1, last):
                allocated[between] += height
    return tuple(min(1.0, each / max(1, num_devices)) for each in allocated)
