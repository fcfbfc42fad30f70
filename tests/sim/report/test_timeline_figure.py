"""Timelines as a picture: every holding is a bar, and the axis fits the longest run."""

import re
from xml.etree import ElementTree as ET

from carpool.sim.report import Recording, RunRecord, timeline_svg


def recorded(name: str, *holdings: tuple[str, int, int, float, float]) -> RunRecord:
    recording = Recording(2)
    for job, first, stop, start, end in holdings:
        recording.held(recording.submitted(job, 0.0, 1), first, stop, start, end)
    return RunRecord(name, {}, recording)


def test_every_holding_is_a_bar_on_each_of_its_devices() -> None:
    svg = timeline_svg(
        [recorded("alone", ("a", 0, 2, 0.0, 10.0)), recorded("shared", ("a", 0, 1, 0.0, 5.0))], ["x", "y"]
    )
    ET.fromstring(svg)
    assert svg.count("<title>a: 0 s to 10.0 s</title>") == 2
    assert svg.count("<title>a: 0 s to 5.00 s</title>") == 1
    widths = [float(width) for width in re.findall(r'width="([\d.]+)" height="22" fill="#0072b2"', svg)]
    assert widths == [744.0, 744.0, 372.0]


def test_names_are_escaped_and_nothing_recorded_is_no_error() -> None:
    ET.fromstring(timeline_svg([recorded("<b>", ("a&b", 0, 1, 0.0, 1e-4))], ["<x>", "y"]))
    ET.fromstring(timeline_svg([recorded("empty")], ["x"]))
