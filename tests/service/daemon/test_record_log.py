"""The daemon logs decisions, orders, faults and recovery; what jobs are given stays secret."""

import asyncio
import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from carpool.backends.run_folder import RunFolder
from carpool.core.messages import JobCrashed, NodeLost, PolicyChanged, Record
from carpool.core.model import JobId, JobSpec, NodeId
from carpool.jobs.devices import LocalDevice, parse_devices
from carpool.jobs.job_file import ListedJob
from carpool.jobs.program import Program
from carpool.logs import configure_logging
from carpool.service.daemon.batch_run import BatchRun, RunRequest
from carpool.service.daemon.record_log import RecordLog
from tests.support.fake_executor import FakeExecutor

SECRET = "s3cr3t"


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root = logging.getLogger("carpool")
    before = root.handlers[:], root.level, root.propagate
    yield
    root.handlers[:], root.propagate = before[0], before[2]
    root.setLevel(before[1])


def events(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    text = capsys.readouterr().err
    assert SECRET not in text
    return [json.loads(line) for line in text.splitlines()]


def test_a_run_logs_recovery_decisions_orders_and_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", "json", {})
    given: dict[str, Any] = {"args": {"token": SECRET}, "environment": {"API_KEY": SECRET}, "notify": (SECRET,)}
    jobs = tuple(ListedJob(JobSpec(JobId(name)), Program(entry="train.py:main", **given)) for name in "ab")
    machine = FakeExecutor({"a": 3, "b": 3}, fails={"b": "no luck"})

    async def start(devices: Sequence[LocalDevice], state: Path) -> FakeExecutor:
        return machine

    devices = tuple(parse_devices("cpu:1", cores=(0,), gpus=()))
    request = RunRequest("jobs", jobs, devices, "fifo", "0")
    run = BatchRun.open(request, RunFolder(tmp_path / "run"), start, lambda at, begun_at: machine)
    asyncio.run(run.run())
    run.close()
    logged = events(capsys)
    assert [each["event"] for each in logged] == [
        *("store_opened", "executor_started", "job_submitted", "job_submitted", "plan", "order"),
        *("job_finished", "plan", "order", "job_failed"),
    ]
    plan, order = logged[4], logged[5]
    assert plan["changes"] == {"a": [0]}
    assert plan["reason"]
    assert (order["order"], order["job"], order["generation"], order["devices"]) == ("assign", "a", 1, [0])
    assert (logged[-1]["level"], logged[-1]["error"]) == ("info", "no luck")


def test_faults_are_logged_at_their_level(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("warning", "json", {})
    faults = (JobCrashed(JobId("a"), 1, 5.0, "gone"), NodeLost(NodeId(0)), PolicyChanged("fifo", "policy Mine failed"))
    RecordLog().record(Record(1.0, (*faults, PolicyChanged("las"))))
    logged = events(capsys)
    assert [(each["event"], each["level"]) for each in logged] == [
        ("job_crashed", "warning"),
        ("node_lost", "warning"),
        ("policy_changed", "error"),
    ]
