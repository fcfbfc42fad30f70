"""Timeline: blocks of a device, rows of devices and nodes, and the utilisation curve."""

import re
from datetime import UTC
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.dashboard.text_format import NUM_COLOURS, colour
from carpool.dashboard.time_window import TimeWindow
from carpool.dashboard.timeline import (
    BINS,
    MAX_DEVICE_ROWS,
    Block,
    Timeline,
    TimelineRow,
    draw_timeline,
    stack_blocks,
)
from carpool.service.queries.views import DeviceView, ForeignProcessView, ResidentView, SpanView

WINDOW = TimeWindow(0.0, 100.0)
RECTANGLE = re.compile(r"M([\d.]+) ([\d.]+)h([\d.]+)v([\d.]+)h-[\d.]+z")


def span(job: str, since: float, until: float | None, fraction: float = 1.0) -> SpanView:
    return SpanView(0, job, fraction, since, until)


@st.composite
def spans(draw: st.DrawFn) -> list[SpanView]:
    found = []
    for number in range(draw(st.integers(0, 8))):
        since = draw(st.integers(-50, 120))
        until = draw(st.none() | st.integers(since, 150))
        fraction = draw(st.sampled_from([0.25, 0.5, 0.75, 1.0]))
        found.append(span(f"j{number}", float(since), None if until is None else float(until), fraction))
    return found


def area(block: Block) -> float:
    return (block.right - block.left) * (block.bottom - block.top)


@given(spans(), st.floats(0.0, 100.0))
def test_blocks_never_overlap_and_stay_inside_the_row(allocations: list[SpanView], now: float) -> None:
    blocks = stack_blocks(allocations, WINDOW, now)
    for block in blocks:
        assert 0.0 <= block.left < block.right <= 1.0
        assert 0.0 <= block.top < block.bottom <= 1.0
    for one, other in combinations(blocks, 2):
        wide = min(one.right, other.right) - max(one.left, other.left)
        high = min(one.bottom, other.bottom) - max(one.top, other.top)
        assert wide <= 0.0 or high <= 1e-9


@given(spans())
def test_the_area_of_blocks_is_the_allocated_time(allocations: list[SpanView]) -> None:
    valid = [each for each in allocations if each.until is None or each.until > each.since]
    allocated = sum(
        min(
            1.0,
            sum(
                each.fraction for each in valid if each.since <= second < (100.0 if each.until is None else each.until)
            ),
        )
        for second in range(100)
    )
    assert 100 * sum(map(area, stack_blocks(allocations, WINDOW, 100.0))) == pytest.approx(allocated)


def test_a_block_continues_if_its_position_does_not_change() -> None:
    blocks = stack_blocks([span("a", 0.0, 50.0, 0.5), span("b", 20.0, 30.0, 0.5)], WINDOW, 100.0)
    assert blocks == [Block("a", 0.0, 0.5, 0.0, 0.5, 0.5), Block("b", 0.2, 0.3, 0.5, 1.0, 0.5)]


def test_blocks_of_an_overbooked_device_are_scaled_down() -> None:
    blocks = stack_blocks([span("a", 0.0, None), span("b", 0.0, None)], WINDOW, 60.0)
    assert blocks == [Block("a", 0.0, 0.6, 0.0, 0.5, 1.0), Block("b", 0.0, 0.6, 0.5, 1.0, 1.0)]


def device(number: int, per_node: int = 4, **fields: object) -> DeviceView:
    node = f"n{number // per_node}"
    known = {"memory_bytes": 80 << 30, "is_lost": False, "residents": ()} | fields
    return DeviceView(number, f"{node}:{number % per_node}", node, "V100", **known)  # type: ignore[arg-type]


def drawn(devices: list[DeviceView], spans: list[SpanView], node: str = "") -> Timeline:
    return draw_timeline(devices, spans, WINDOW, 100.0, UTC, node)


def rows(timeline: Timeline) -> list[TimelineRow]:
    return [row for _, group in timeline.groups for row in group]


def test_averages_leave_out_the_time_before_the_daemon_and_after_now() -> None:
    spans = [SpanView(0, "a", 1.0, 60.0, 70.0)]
    whole = draw_timeline([device(0)], spans, WINDOW, 100.0, UTC)
    late = draw_timeline([device(0)], spans, WINDOW, 80.0, UTC, begins_at=60.0)
    assert whole.mean_utilisation == pytest.approx(0.1, abs=0.02)
    assert late.mean_utilisation == pytest.approx(0.5, abs=0.02)
    assert late.observed_s == 20.0


def test_few_devices_have_a_row_each() -> None:
    timeline = drawn([device(number) for number in range(8)], [SpanView(5, "a", 0.5, 10.0, 60.0)])
    assert [name for name, _ in timeline.groups] == ["n0", "n1"]
    assert [row.name for row in rows(timeline)] == [f"n{node}:{place}" for node in (0, 1) for place in range(4)]
    (bar,) = rows(timeline)[5].bars
    assert (bar.x, bar.width, bar.y, bar.height, bar.label) == ("10.000%", "50.000%", "0.00%", "50.00%", "a 50%")
    assert timeline.mean_utilisation == pytest.approx(0.5 * 0.5 / 8)


def test_many_devices_are_condensed_to_nodes() -> None:
    devices = [device(number) for number in range(MAX_DEVICE_ROWS + 4)]
    spans = [SpanView(number, "wide", 1.0, 0.0, None) for number in range(4)]
    timeline = drawn(devices, spans)
    assert [row.name for row in rows(timeline)] == [f"n{node}" for node in range(len(devices) // 4)]
    (shape,) = rows(timeline)[0].shapes
    assert shape.path == "M0.0 0.0h1000.0v100.0h-1000.0z"  # a job on a whole node is one rectangle
    opened = drawn(devices, spans, node="n0")
    assert [len(row.bars) for row in rows(opened)] == [1, 1, 1, 1]


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(st.integers(0, 47), st.integers(0, 90), st.integers(1, 60), st.sampled_from([0.25, 0.5, 1.0])),
        max_size=60,
    )
)
def test_condensed_rows_cover_the_allocated_time(held: list[tuple[int, int, int, float]]) -> None:
    spans = [
        SpanView(number, f"j{place}", fraction, float(since), float(since + length))
        for place, (number, since, length, fraction) in enumerate(held)
    ]
    timeline = drawn([device(number) for number in range(48)], spans)
    covered = sum(
        float(wide) * float(high) / 1e5 * 4
        for row in rows(timeline)
        for shape in row.shapes
        for _, _, wide, high in RECTANGLE.findall(shape.path)
    )
    assert covered == pytest.approx(48 * timeline.mean_utilisation, abs=0.02 * (1 + len(spans)))


def test_blocks_too_short_to_draw_are_counted() -> None:
    timeline = drawn([device(0)], [SpanView(0, "short", 1.0, 10.0, 10.01), SpanView(0, "long", 1.0, 20.0, 90.0)])
    assert timeline.num_hidden == 1
    assert [bar.job for bar in rows(timeline)[0].bars] == ["long"]


def test_rows_have_the_present_residents() -> None:
    residents = (ResidentView("a", 0.5, 0, 10 << 30), ResidentView("", 0.75, 0, 30 << 30))
    (row,) = rows(drawn([device(0, residents=residents, is_lost=True)], []))
    assert (row.allocated, row.num_lost, row.claimed_fraction) == (1.0, 1, 0.5)
    assert [each.job for each in row.residents] == ["a", ""]


def test_a_cluster_without_devices() -> None:
    timeline = drawn([], [])
    assert (timeline.devices, timeline.groups, timeline.mean_utilisation) == (0, (), 0.0)
    assert len(timeline.utilisation) == BINS


def test_a_job_keeps_its_colour_and_other_users_share_one() -> None:
    assert colour("a") == colour("a")
    assert {colour(f"job-{number}") for number in range(200)} == {f"c{place}" for place in range(NUM_COLOURS)}
    assert colour("") == "other-user"


def test_rows_have_foreign_processes() -> None:
    process = ForeignProcessView("n0:1", 17, "ada", "python", 3 << 30, True)
    timeline = drawn([device(0), device(1, outsiders=(process,))], [])
    assert [row.foreign for row in rows(timeline)] == [(), (process,)]
