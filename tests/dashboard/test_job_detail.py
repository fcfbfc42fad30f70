"""Curves and timeline of a job, and its devices as text."""

from dataclasses import fields
from datetime import UTC
from typing import Any

from carpool.core.model import JobId, Phase
from carpool.dashboard.job_detail import count_devices, format_devices, job_curves
from carpool.service.queries.views import DeviceShareView, DeviceView, JobView, MeasurementView, SpanView

_KNOWN: dict[str, Any] = {
    **{field.name: None for field in fields(JobView)},
    "id": JobId("a"),
    "user": "ada",
    "phase": Phase.RUNNING,
    "submitted_at": 1000.0,
    "holds": (),
    "metrics": {},
    "min_devices": 1,
    "max_devices": 1,
    "waited_s": 0.0,
    "steps": 0.0,
    "steps_per_s": 0.0,
}
JOB = JobView(**_KNOWN)


def test_devices_are_counted_by_fraction_over_time() -> None:
    spans = [
        SpanView(0, "a", 1.0, 1010.0, 1020.0),
        SpanView(0, "a", 0.5, 1020.0, None),
        SpanView(1, "a", 0.5, 1020.0, None),
        SpanView(1, "other", 1.0, 1000.0, 1020.0),
    ]
    assert count_devices(JOB, spans, 1050.0) == [(0.0, 0.0), (10.0, 1.0), (20.0, 1.0), (50.0, 1.0)]
    assert count_devices(JOB, [], 1050.0) == []


def test_curves_of_reported_values() -> None:
    measured = [
        MeasurementView(1010.0, 1, 2.0, 4.0),
        MeasurementView(1020.0, 2, None, 5.0, {"accuracy": 0.5}),
        MeasurementView(1030.0, 3, 1.0, None),
    ]
    curves = job_curves(JOB, measured, [], [], 1100.0, UTC)
    assert curves.loss.curves[0].xs == "1 3"
    assert curves.rate.curves[0].xs == "10 20"
    assert [name for name, _ in curves.metrics] == ["accuracy"]
    assert not curves.devices.curves


def test_the_timeline_shows_the_devices_of_the_job() -> None:
    devices = [DeviceView(number, f"g{number}", "n0", "V100", 0, False, ()) for number in range(4)]
    spans = [SpanView(2, "a", 0.5, 1020.0, 1040.0), SpanView(3, "a", 1.0, 1040.0, None)]
    timeline = job_curves(JOB, [], spans, devices, 1100.0, UTC).timeline
    ((_, rows),) = timeline.groups
    assert [(row.name, [(bar.x, bar.width) for bar in row.bars]) for row in rows] == [
        ("g2", [("20.000%", "20.000%")]),
        ("g3", [("40.000%", "60.000%")]),
    ]


def test_consecutive_devices_are_formatted_as_a_range() -> None:
    row = [DeviceShareView(place, f"n4:{place}", 1.0) for place in range(8)]
    assert format_devices(row) == "n4:0–7"
    assert format_devices([*row[:2], DeviceShareView(3, "n4:3", 0.5)]) == "n4:0–1, n4:3 at 50%"
    assert format_devices([DeviceShareView(0, "cpu", 1.0)]) == "cpu"
    assert format_devices([]) == "none"
    assert format_devices([DeviceShareView(place, f"n{place}:0", 1.0) for place in range(9)]).endswith(" and 3 more")
