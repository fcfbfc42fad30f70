"""Messages, files and programs that a job controls end that job alone; the executor and its neighbour go on."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from carpool.core.messages import Assign, AssignApplied, Fact, JobFailed
from carpool.core.model import Allocation, JobId
from carpool.core.typed_fields import MAX_INT
from carpool.jobs.program import Program
from carpool.runtime.executor.client_protocol import ExecutorOptions, checked_report_from_json, report_to_json
from carpool.runtime.executor.executor import Executor
from carpool.runtime.executor.job_guard import JobMarker, marked_job
from carpool.runtime.executor.reports import Facts, Outcome, Report, Sized
from carpool.runtime.process import protocol
from carpool.runtime.process.channel import ProtocolError, decode
from carpool.runtime.process.protocol import Begin, Contributed, Message, Proceed, Ready, Stepped, WorkerFailed
from tests.runtime.executor.test_executor import DEVICES, READY, FakePool, close_files

BAD, GOOD = JobId("bad"), JobId("good")
FROM_WORKERS = [
    kind
    for kind in vars(protocol).values()
    if isinstance(kind, type) and issubclass(kind, Message) and kind not in (Message, Begin)
]


class Rig:
    """An executor with a job that misbehaves and a neighbour, each on its own device."""

    def __init__(self, state: Path) -> None:
        self.pool = FakePool()
        self.reports: list[Report] = []
        self.executor = Executor(DEVICES, state, ExecutorOptions(), self.reports.append, self.pool.dependencies())
        for job in (BAD, GOOD):
            self.executor.add_job(job, Program(entry="jobs.py:tiny"), resume=False)
        self.executor.apply_orders([Assign(BAD, Allocation.of(0), 1), Assign(GOOD, Allocation.of(1), 1)])
        self.bad, self.good = self.pool.launched

    @property
    def facts(self) -> list[Fact]:
        return [fact for report in self.reports if isinstance(report, Facts) for fact in report.facts]

    @property
    def failed(self) -> dict[JobId, str]:
        return {fact.job: fact.error for fact in self.facts if isinstance(fact, JobFailed)}

    def check_neighbour(self) -> None:
        """The neighbour starts, and no report about any job is refused by the client."""
        self.executor.tick()
        self.executor.workers.on_message(self.good, READY)
        assert AssignApplied(GOOD, 1, 0.0) in self.facts
        assert GOOD not in self.failed
        for report in self.reports:
            received = checked_report_from_json(report_to_json(report))
            assert not (isinstance(received, Facts) and received.invalid), received


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    close_files(rig.executor)


@pytest.mark.parametrize(
    "messages",
    [
        [Ready("f", 0, 0, 0, 0)],
        [Ready("f", MAX_INT, MAX_INT, MAX_INT, MAX_INT, sizes=(MAX_INT,) * 3)],
        [READY, READY, Contributed(1, 0, 0.1, 4), Contributed(9, 9, 0.0, 0)],
        [READY, Stepped(MAX_INT, MAX_INT, math.nan, float(MAX_INT), 5e-324, memory_bytes=MAX_INT)],
        [WorkerFailed("memory", "x", MAX_INT, MAX_INT)],
        [WorkerFailed("?", "x")],
        [Proceed(1)],
    ],
    ids=lambda messages: type(messages[-1]).__name__,
)
def test_messages_within_their_ranges_and_without_sense_harm_no_other_job(rig: Rig, messages: list[Message]) -> None:
    for message in messages:
        rig.executor.workers.on_message(rig.bad, message)
    rig.check_neighbour()


def test_a_worker_that_breaks_the_protocol_fails_its_job_with_the_reason(rig: Rig) -> None:
    rig.executor.workers.on_message(rig.bad, WorkerFailed("protocol", "its worker sent Ready.total_steps"))
    rig.executor.workers.on_exit(rig.bad, "killed by SIGKILL")
    assert "Ready.total_steps" in rig.failed[BAD]
    rig.check_neighbour()


def test_an_error_in_handling_a_job_fails_that_job_and_names_it(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = rig.executor.jobs.trainings[BAD].machine

    def explode(*given: object) -> None:
        raise ZeroDivisionError("in a state machine")

    monkeypatch.setattr(machine, "message", explode)
    rig.executor.workers.on_message(rig.bad, READY)
    rig.executor.workers.on_exit(rig.bad, "killed by SIGKILL")
    assert "ZeroDivisionError" in rig.failed[BAD]
    rig.check_neighbour()


def test_a_job_whose_state_machine_is_unusable_is_abandoned(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = rig.executor.jobs.trainings[BAD].machine

    def explode(*given: object, **named: object) -> None:
        raise ZeroDivisionError

    for method in ("message", "fail", "tick", "exited"):
        monkeypatch.setattr(machine, method, explode)
    rig.executor.workers.on_message(rig.bad, READY)
    assert rig.pool.killed == [rig.bad]
    assert BAD in rig.failed
    rig.executor.workers.on_exit(rig.bad, "killed by SIGKILL")
    rig.check_neighbour()


COUNTS = st.sampled_from([0, 1, 2, 7, 64, MAX_INT])
AMOUNTS = st.sampled_from([0.0, 5e-324, 1e-9, 1.0, 1e9, float(MAX_INT)])
MEASURED = AMOUNTS | st.sampled_from([math.nan, math.inf, -1.0])
TEXTS = st.sampled_from(["", "disk", "memory", "device", "lane", "user", "f", "digest", "x" * 70_000])
VALUES: dict[str, st.SearchStrategy[object]] = {
    "int": COUNTS,
    "str": TEXTS,
    "bool": st.booleans(),
    "Amount": AMOUNTS,
    "Seconds": AMOUNTS,
    "Measured": MEASURED,
    "Mapping[str, Measured]": st.dictionaries(TEXTS, MEASURED, max_size=2),
    "tuple[str, ...]": st.lists(TEXTS, max_size=2),
    "tuple[int, ...]": st.lists(COUNTS, max_size=3),
    "tuple[tuple[int, int], ...]": st.lists(st.tuples(COUNTS, COUNTS), max_size=2),
}


@st.composite
def lines(draw: st.DrawFn) -> bytes:
    """A message of any kind; most have values that the protocol accepts."""
    kind = draw(st.sampled_from(FROM_WORKERS))
    values = {field.name: draw(VALUES.get(str(field.type).removesuffix(" | None"), COUNTS)) for field in fields(kind)}
    return json.dumps({"say": kind.__name__, **values}).encode()


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=80, deadline=None
)
@given(st.lists(lines(), max_size=8), st.booleans())
def test_any_messages_of_a_worker_leave_the_neighbour_alone(
    tmp_path_factory: pytest.TempPathFactory, sent: list[bytes], is_ready: bool
) -> None:
    rig = Rig(tmp_path_factory.mktemp("state"))
    if is_ready:
        rig.executor.workers.on_message(rig.bad, READY)
    for line in sent:
        try:
            rig.executor.workers.on_message(rig.bad, decode(line))
        except ProtocolError as error:
            rig.executor.workers.on_message(rig.bad, WorkerFailed("protocol", str(error)))
    rig.executor.tick()
    rig.executor.workers.on_exit(rig.bad, "killed by SIGKILL")
    rig.check_neighbour()
    close_files(rig.executor)


def test_reports_out_of_range_become_the_end_of_their_job() -> None:
    """Were an executor to pass them on, the daemon would still refuse them."""
    for report in (Sized(BAD, 10**400), Outcome(BAD, -1, 0, None), Sized(BAD, 5, target_loss="x")):  # type: ignore[arg-type]
        received = checked_report_from_json(report_to_json(report))
        assert isinstance(received, Facts)
        assert [job for job, _ in received.invalid] == [BAD]


def test_the_marker_names_the_job_in_hand_even_after_a_crash(tmp_path: Path) -> None:
    path = tmp_path / "job"
    assert marked_job(path) is None
    pid = os.fork()
    if not pid:
        marker = JobMarker(path)
        marker.set(GOOD)
        marker.clear()
        marker.set(BAD)
        os._exit(0)
    os.waitpid(pid, 0)
    assert marked_job(path) == BAD
    JobMarker(path).clear()
    assert marked_job(path) is None
