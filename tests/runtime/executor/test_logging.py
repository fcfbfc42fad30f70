"""Log of an executor process: where it goes, what it contains, and what it must not contain."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from carpool.core.messages import Assign, JobFinished
from carpool.core.model import Allocation, JobId
from carpool.jobs.devices import LocalDevice
from carpool.jobs.program import Program
from carpool.runtime.executor.client import Claim, ExecutorClient, ExecutorSocket
from carpool.runtime.executor.client_protocol import ExecutorOptions
from carpool.runtime.executor.executor import Executor
from carpool.runtime.executor.reports import Facts, Gone
from carpool.runtime.process.protocol import WorkerFailed
from tests.runtime.executor.test_executor import DEVICES, READY, FakePool

JOB = JobId("a")
LOGGED = {"CARPOOL_LOG_LEVEL": "info", "CARPOOL_LOG_FORMAT": "json"}
TIMEOUT_S = 60.0
DEVICE = LocalDevice(0, "cpu:0", "cpu1")


def events_in(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


async def run_command(client: ExecutorClient, folder: Path) -> None:
    """Run a command to its end."""
    environment = {"API_TOKEN": "hunter2"}
    client.introduce(JOB, Program(command=("true",), folder=str(folder), environment=environment))
    client.carry([Assign(JOB, Allocation.of(0), 1)])
    client.proceed()
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            report = await client.receive()
            if isinstance(report, Facts) and any(isinstance(fact, JobFinished) for fact in report.facts):
                return


async def stop(client: ExecutorClient) -> None:
    await client.stop(checkpoint=False)
    while not isinstance(await client.receive(), Gone):
        pass


def test_for_one_client_the_log_is_in_the_state_folder_and_stderr_stays_empty(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async def work() -> None:
        options = ExecutorOptions(environment=LOGGED)
        client = await ExecutorClient.start([DEVICE], tmp_path / "state", options=options)
        assert not (tmp_path / "state").exists(), "nothing is written before the first job"
        await run_command(client, tmp_path)
        await stop(client)

    asyncio.run(work())
    log = tmp_path / "state" / "executor.log"
    names = [event["event"] for event in events_in(log)]
    assert [name for name in names if name not in ("mps_unavailable", "forkserver_ready")] == [
        *("claimed", "order", "command_started", "command_exited", "job_ended", "stop", "closed"),
    ]
    assert "hunter2" not in log.read_text(encoding="utf-8")
    assert capfd.readouterr().err == ""


def test_a_server_logs_to_its_folder_and_records_lost_clients_and_new_claims(tmp_path: Path) -> None:
    async def work() -> None:
        server = ExecutorSocket(tmp_path / "executor")
        options = ExecutorOptions(on_orphan="wait", environment=LOGGED)
        end, process = server.start_executor(LOGGED)
        client = await ExecutorClient.claim(end, Claim([DEVICE], tmp_path / "state", options), process)
        await run_command(client, tmp_path)
        client._writer.transport.abort()  # as a crash does
        client._writer.close()
        client._process.close()
        end_again = server.connect()
        assert end_again is not None
        again = await ExecutorClient.claim(end_again, Claim([DEVICE], tmp_path / "state", options, 2))
        await stop(again)
        process.wait()

    asyncio.run(work())
    events = events_in(tmp_path / "executor" / "executor.log")
    claims = [(event["epoch"], event["first"]) for event in events if event["event"] == "claimed"]
    assert claims == [(1, True), (2, False)]
    assert [event["level"] for event in events if event["event"] == "client_lost"] == ["warning"]
    assert not (tmp_path / "state" / "executor.log").exists()


class Records(logging.Handler):
    """Keeps the names, levels and fields of logged events."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[str, str, dict[str, Any]]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.events.append((record.getMessage(), record.levelname, getattr(record, "fields", {})))


@pytest.fixture
def records() -> Iterator[Records]:
    logger, handler = logging.getLogger("carpool.runtime"), Records()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


def test_launches_failures_and_losses_of_workers_are_logged(tmp_path: Path, records: Records) -> None:
    pool = FakePool()
    executor = Executor(DEVICES, tmp_path, ExecutorOptions(), lambda report: None, pool.dependencies())
    executor.add_job(JOB, Program(entry="jobs.py:tiny", environment={"API_TOKEN": "hunter2"}), resume=False)
    executor.apply_orders([Assign(JOB, Allocation.of(0), 1)])
    (first,) = pool.launched
    executor.workers.on_message(first, READY)
    executor.workers.on_message(first, WorkerFailed("memory", "out of memory", 0))
    executor.workers.on_exit(first, "killed by SIGKILL")
    second = pool.launched[-1]
    executor.stop(checkpoint=False)
    executor.workers.on_exit(second, "killed by SIGKILL")
    assert [(name, level) for name, level, _ in records.events] == [
        ("order", "INFO"),
        ("worker_launched", "INFO"),
        ("worker_failed", "WARNING"),
        ("worker_lost", "WARNING"),
        ("worker_launched", "INFO"),
        ("worker_exited", "INFO"),
    ]
    assert records.events[2][2]["kind"] == "memory"
    assert [fields["restarts"] for name, _, fields in records.events if name == "worker_launched"] == [0, 1]
    assert "hunter2" not in str(records.events)
