"""The timeline has every device once, condenses where they are many, and its curve is what its blocks add up to."""

import re
from datetime import UTC

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.dashboard.text_format import NUM_COLOURS, colour
from carpool.dashboard.time_window import TimeWindow
from carpool.dashboard.timeline import BINS, MOST_ROWS, Timeline, TimelineRow, draw_timeline
from carpool.service.queries.views import DeviceView, ForeignProcessView, ResidentView, SpanView

WINDOW = TimeWindow(0.0, 100.0)
RECTANGLE = re.compile(r"M([\d.]+) ([\d.]+)h([\d.]+)v([\d.]+)h-[\d.]+z")


def device(number: int, per_node: int = 4, **fields: object) -> DeviceView:
    node = f"n{number // per_node}"
    known = {"memory_bytes": 80 << 30, "is_lost": False, "residents": ()} | fields
    return DeviceView(number, f"{node}:{number % per_node}", node, "V100", **known)  # type: ignore[arg-type]


def drawn(devices: list[DeviceView], spans: list[SpanView], node: str = "") -> Timeline:
    return draw_timeline(devices, spans, WINDOW, 100.0, UTC, node)


def rows(timeline: Timeline) -> list[TimelineRow]:
    return [row for _, group in timeline.groups for row in group]


def test_few_devices_have_a_row_each_under_their_node() -> None:
    timeline = drawn([device(number) for number in range(8)], [SpanView(5, "a", 0.5, 10.0, 60.0)])
    assert [name for name, _ in timeline.groups] == ["n0", "n1"]
    assert [row.name for row in rows(timeline)] == [f"n{node}:{place}" for node in (0, 1) for place in range(4)]
    (bar,) = rows(timeline)[5].bars
    assert (bar.x, bar.width, bar.y, bar.height, bar.words) == ("10.000%", "50.000%", "0.00%", "50.00%", "a 50%")
    assert timeline.mean_utilisation == pytest.approx(0.5 * 0.5 / 8)


def test_many_devices_are_condensed_and_a_node_can_be_opened() -> None:
    devices = [device(number) for number in range(MOST_ROWS + 4)]
    spans = [SpanView(number, "wide", 1.0, 0.0, None) for number in range(4)]
    timeline = drawn(devices, spans)
    assert [row.name for row in rows(timeline)] == [f"n{node}" for node in range(len(devices) // 4)]
    (shape,) = rows(timeline)[0].shapes
    assert shape.path == "M0.0 0.0h1000.0v100.0h-1000.0z"  # a gang on a whole node is one rectangle
    opened = drawn(devices, spans, node="n0")
    assert [len(row.bars) for row in rows(opened)] == [1, 1, 1, 1]


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(st.integers(0, 47), st.integers(0, 90), st.integers(1, 60), st.sampled_from([0.25, 0.5, 1.0])),
        max_size=60,
    )
)
def test_condensed_rows_cover_what_was_held(held: list[tuple[int, int, int, float]]) -> None:
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


def test_what_cannot_be_seen_is_counted() -> None:
    timeline = drawn([device(0)], [SpanView(0, "short", 1.0, 10.0, 10.01), SpanView(0, "long", 1.0, 20.0, 90.0)])
    assert timeline.num_left_out == 1
    assert [bar.job for bar in rows(timeline)[0].bars] == ["long"]


def test_rows_say_who_is_there_now() -> None:
    there = (ResidentView("a", 0.5, 0, 10 << 30), ResidentView("", 0.75, 0, 30 << 30))
    (row,) = rows(drawn([device(0, residents=there, is_lost=True)], []))
    assert (row.held, row.num_lost, row.claimed_part) == (1.0, 1, 0.5)
    assert [each.job for each in row.residents] == ["a", ""]


def test_nothing_at_all_can_be_drawn() -> None:
    timeline = drawn([], [])
    assert (timeline.devices, timeline.groups, timeline.mean_utilisation) == (0, (), 0.0)
    assert len(timeline.utilisation) == BINS


def test_a_job_keeps_its_colour_and_strangers_share_theirs() -> None:
    assert colour("a") == colour("a")
    assert {colour(f"job-{number}") for number in range(200)} == {f"c{place}" for place in range(NUM_COLOURS)}
    assert colour("") == "theirs"


def test_a_row_knows_who_else_computes_there() -> None:
    somebody = ForeignProcessView("n0:1", 17, "ada", "python", 3 << 30, True)
    timeline = drawn([device(0), device(1, outsiders=(somebody,))], [])
    assert [row.outsiders for row in rows(timeline)] == [(), (somebody,)]
