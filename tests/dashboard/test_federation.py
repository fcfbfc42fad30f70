"""The page of a federation, from the records of a coordinator with simulated devices."""

import io
from html import escape
from pathlib import Path

import pytest

from carpool.core.model import Kind
from carpool.dashboard.federation import Federations, FederationView, draw_federation, federation_page
from carpool.federated.coordinator import Coordinator
from carpool.federated.federation import DeviceName, Federation, Task, TaskName
from carpool.federated.journal import JournalWriter
from carpool.federated.messages import (
    DeviceJoined,
    DeviceLost,
    Evaluated,
    Record,
    StartWork,
    TaskResult,
    Work,
    WorkReported,
)
from carpool.service.service import NotFound

A, B = TaskName("a"), TaskName("b<i>")
FEDERATION = Federation((Task(A, rounds=3), Task(B, rounds=3)), plan="equal-epochs", deadline_s=10.0, grace_s=0.0)


def played(num_cycles: int = 3) -> tuple[list[Record], str]:
    """A fast device, one that needs four times as long, and one that never answers."""
    records: list[Record] = []
    stream = io.StringIO()
    coordinator = Coordinator(FEDERATION, observers=[records.append, JournalWriter(stream, FEDERATION)])
    names = [DeviceName(name) for name in ("fast", "slow", "silent")]
    orders = coordinator.handle(0.0, [DeviceJoined(name, Kind("cpu"), {A: 100, B: 50}) for name in names])
    for _ in range(num_cycles):
        at = coordinator.at
        for name, seconds in (("fast", 2.0), ("slow", 8.0)):
            order = next(each for each in orders if isinstance(each, StartWork) and each.device == name)
            results = [TaskResult(w.task, w.round, w.samples, _num_steps(w), 0.1, 1000) for w in order.work]
            coordinator.handle(at + seconds, [WorkReported(order.device, order.cycle, tuple(results))])
        orders = coordinator.handle(at + 10.0, [])
        for task in (A, B):
            rounds = coordinator.tasks[task].rounds
            coordinator.handle(at + 10.0, [Evaluated(task, rounds, {"accuracy": rounds / 10})])
    return records, stream.getvalue()


def _num_steps(work: Work) -> int:
    return -(-work.samples // work.batch_size)


def view() -> FederationView:
    return draw_federation("mine", FEDERATION, played()[0])


def test_tasks_and_devices() -> None:
    found = view()
    assert [(task.name, task.rounds, task.num_rounds, task.metrics) for task in found.tasks] == [
        (A, 3, 3, "accuracy 0.3"),
        (B, 3, 3, "accuracy 0.3"),
    ]
    assert [device.name for device in found.devices] == ["fast", "silent", "slow"]
    assert found.tasks[0].samples == (300, 0, 300)
    assert found.is_over
    assert found.num_bytes == 2 * 3 * 2 * 2 * 1000


def test_the_timeline_shows_work_idle_time_and_missing_devices() -> None:
    rows = {device.name: device for device in view().devices}
    assert rows["fast"].idle_s == pytest.approx(24.0)
    assert [(span.kind, round(span.x, 1), round(span.width, 1)) for span in rows["fast"].spans[:3]] == [
        ("works", 0.0, 6.7),
        ("idle", 6.7, 26.7),
        ("works", 33.3, 6.7),
    ]
    assert {span.kind for span in rows["silent"].spans} == {"missing"}
    assert sum(span.width for span in rows["silent"].spans) == pytest.approx(100.0)


def test_a_lost_device_and_a_federation_that_goes_on() -> None:
    records = [*played(2)[0][:-1], Record(30.0, (DeviceLost(DeviceName("slow")),))]
    found = draw_federation("mine", FEDERATION, records)
    assert not found.is_over
    assert [device.name for device in found.devices if not device.is_present] == ["slow"]
    assert "http-equiv" in federation_page(found)


def test_the_file_needs_no_server() -> None:
    page = federation_page(view())
    assert "b&lt;i&gt;" in page
    assert "<i>" not in page.split("</style>")[1]
    assert 'class="idle"' in page
    assert "http-equiv" not in page
    assert "<script" not in page
    assert "href=" not in page


def test_each_curve_is_named_beside_its_colour() -> None:
    page = federation_page(view())
    for place, task in enumerate((A, B)):
        key = f'<path class="curve k{place}" d="M1 5H17"/></svg> {escape(task)}'
        assert key in page


def test_an_empty_federation_has_a_page() -> None:
    assert "0 cycles" in federation_page(draw_federation("new", FEDERATION, []))


def test_folders_are_listed_and_read(tmp_path: Path) -> None:
    federations = Federations(tmp_path)
    assert federations.listed() == []
    (tmp_path / "one").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "one" / "journal.jsonl").write_text(played()[1])
    assert federations.listed() == ["one"]
    assert federations.get("one").num_cycles == 3
    for name in ("other", "../one", "none"):
        with pytest.raises(NotFound):
            federations.get(name)
