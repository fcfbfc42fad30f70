"""Metrics of a command: from its output and its event files, while it runs and at its end."""

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from carpool.core.messages import Fact, JobFinished
from carpool.core.model import JobId
from carpool.jobs.devices import LocalDevice
from carpool.jobs.host import CoreAllocator
from carpool.jobs.program import Program
from carpool.runtime.commands.command_metrics import CommandMetrics, EvaluationLimiter
from carpool.runtime.commands.command_process import CommandProcess
from carpool.runtime.commands.metric_lines import MetricRow
from carpool.runtime.commands.tensorboard import EventFile
from carpool.runtime.executor.job_folder import JobFolder
from carpool.runtime.executor.reports import Evaluation, Report
from carpool.runtime.job_state.types import Target, WorkerSlot
from carpool.runtime.process.protocol import Message


def line(step: int, **metrics: float) -> str:
    return json.dumps({"step": step, **metrics}) + "\n"


def test_only_new_lines_are_read(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(line(1, a=1))  # of an earlier start
    metrics = CommandMetrics(log, tmp_path, (), since=0.0)
    assert metrics.poll() == []
    with log.open("a") as file:
        file.write("hello\n" + line(2, a=2) + line(2, b=3) + '{"step": 3, ')
    assert metrics.poll() == [(2, {"a": 2.0, "b": 3.0})]
    with log.open("a") as file:
        file.write('"a": 5}\n')
    assert metrics.poll() == [(3, {"a": 5.0})]
    log.write_text(line(4, a=4))  # rotated
    assert metrics.poll() == [(4, {"a": 4.0})]


def test_many_rows_are_thinned_and_the_newest_kept(tmp_path: Path) -> None:
    log = tmp_path / "log"
    metrics = CommandMetrics(log, tmp_path, (), since=0.0)
    log.write_text("".join(line(step, a=step) for step in range(1, 1001)))
    found = metrics.poll()
    assert len(found) <= 8
    assert found[-1] == (1000, {"a": 1000.0})


def test_event_files_are_found_by_pattern_unless_they_are_older(tmp_path: Path) -> None:
    for name in ("old", "new"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        EventFile(tmp_path / "runs" / name).add(7, {name: 1.0})
    for path in (tmp_path / "runs" / "old").iterdir():
        os.utime(path, (1000.0, 1000.0))
    os.mkfifo(tmp_path / "runs" / "new" / "events.fifo")
    metrics = CommandMetrics(tmp_path / "log", tmp_path, ("runs/*/events*",), since=2000.0)
    assert metrics.poll() == [(7, {"new": 1.0})]
    assert metrics.poll() == []


def test_the_number_of_names_is_bounded(tmp_path: Path) -> None:
    log = tmp_path / "log"
    metrics = CommandMetrics(log, tmp_path, (), since=0.0)
    log.write_text("".join(line(step, **{f"m{step}": 1.0}) for step in range(200)))
    assert len({name for row in metrics.poll() for name in row.metrics}) <= 64


def test_metrics_of_a_session_are_merged_when_they_come_too_fast() -> None:
    limiter = EvaluationLimiter()
    passed = [row for step in range(1000) for row in limiter.add(100.0, MetricRow(step, {f"m{step % 2}": float(step)}))]
    assert [row.step for row in passed] == list(range(8))
    assert limiter.flush(100.01) == []
    assert limiter.flush(101.0) == [MetricRow(999, {"m0": 998.0, "m1": 999.0})]
    assert limiter.flush(102.0, is_last=True) == []


class Collector:
    """Keeps what a command reports."""

    def __init__(self) -> None:
        self.reports: list[Report] = []
        self.finished = asyncio.Event()

    def on_command(self, command: CommandProcess, facts: Sequence[Fact], reports: Sequence[Report]) -> None:
        self.reports += reports
        if any(isinstance(fact, JobFinished) for fact in facts):
            self.finished.set()

    def on_session_message(self, command: CommandProcess, message: Message) -> None:
        pass


def test_what_a_command_prints_last_is_reported_before_its_end(tmp_path: Path) -> None:
    program = Program(command=(sys.executable, "-c", f"print({line(3, acc=0.5)!r})"), folder=str(tmp_path))

    async def run() -> list[Report]:
        folder, collector = JobFolder(tmp_path, "a"), Collector()
        folder.make(resume=False)
        device = LocalDevice(0, "cpu:0", "cpu1", (0,))
        command = CommandProcess(JobId("a"), program, folder, {0: device}, CoreAllocator([0]), 1.0, collector)
        command.order(0.0, Target(1, (WorkerSlot(0),)))
        await collector.finished.wait()
        command.close()
        return collector.reports

    first, *_ = asyncio.run(run())
    assert first == Evaluation(JobId("a"), 3, {"acc": 0.5})
