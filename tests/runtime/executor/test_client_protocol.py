"""JSON of orders, reports and options; job folders."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from carpool.core.messages import Assign, AssignApplied, JobFailed, Order, Probe, ProgressReported, Release
from carpool.core.model import Allocation, JobId, Share
from carpool.runtime.executor.client_protocol import (
    ExecutorOptions,
    json_line,
    order_from_json,
    order_to_json,
    report_from_json,
    report_to_json,
)
from carpool.runtime.executor.job_folder import JobFolder
from carpool.runtime.executor.reports import Evaluation, Facts, Gone, Outcome, Report, Sized, Told
from carpool.runtime.job_state.actions import BatchSplit
from carpool.runtime.job_state.types import StateCopy

JOB = JobId("a")
ORDERS: list[Order] = [
    Release(JOB, 3),
    Assign(JOB, Allocation((Share(range(2), 0.5, 1), Share(range(3, 4))), 64, (1, 2, 3)), 4),
    Assign(JOB, Allocation.of(0), 5, Probe(7)),
]
REPORTS: list[Report] = [
    Facts((AssignApplied(JOB, 1, 2.0), ProgressReported(JOB, 1, 3.0, 0.5, 0.1), JobFailed(JOB, 1, "é\n"))),
    Sized(JOB, 12, 3, 4),
    Sized(JOB, None, 3, 4, target_loss=0.05, window=5),
    Told(JOB, "text"),
    Evaluation(JOB, 3, {"accuracy": 0.5}),
    Outcome(JOB, 1, 2, 0.5, {"accuracy": 0.5}, "abc", "done", 3.0),
    Gone("killed"),
]


@pytest.mark.parametrize("order", ORDERS)
def test_orders(order: Order) -> None:
    assert order_from_json(json.loads(json_line(order_to_json(order)))) == order


@pytest.mark.parametrize("report", REPORTS)
def test_reports(report: Report) -> None:
    assert report_from_json(json.loads(json_line(report_to_json(report)))) == report


def test_options() -> None:
    options = ExecutorOptions(mps=False, environment={"c": "d"})
    assert ExecutorOptions(**json.loads(json_line(asdict(options)))) == options


@pytest.mark.parametrize(
    "name", ["plain-1.x", "../up", "/abs", "..", ".hidden", "a b", "ä/ö", "a" + "é" * 60, "a" * 300]
)
def test_a_job_folder_is_inside_the_state_folder(tmp_path: Path, name: str) -> None:
    folder = JobFolder(tmp_path, name)
    assert folder.path.resolve().parent == (tmp_path / "jobs").resolve()
    folder.make(resume=False)
    assert JobFolder(tmp_path, name + "x").path != folder.path


def test_plain_names_are_kept(tmp_path: Path) -> None:
    assert JobFolder(tmp_path, "mlp-fast_2.x").path == tmp_path / "jobs" / "mlp-fast_2.x"


def test_state_of_an_earlier_run_is_resumed_or_moved_aside(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path, "a")
    folder.make(resume=False)
    folder.checkpoints.mkdir()
    for step in (20, 3):
        (folder.checkpoints / f"step-{step:09d}.ckpt").touch()
    (folder.checkpoints / "best.ckpt").touch()
    folder.write(BatchSplit(0, (0,), ()))
    assert json.loads((folder.path / "cuts.jsonl").read_text()) == {"schema": 1, "step": 0, "devices": [0], "parts": []}
    folder.write(BatchSplit(8, (0, 1), (3, 4)))
    folder.write(BatchSplit(5, (0, 1), (2, 5)))
    with (folder.path / "cuts.jsonl").open("a") as file:
        file.write('{"step": 9, "dev')  # truncated by a crash
    folder.make(resume=True)
    folder.write(BatchSplit(9, (0, 1), (1, 6)))
    paths = [str(folder.checkpoints / f"step-{step:09d}.ckpt") for step in (3, 20)]
    assert folder.state_copies() == [StateCopy(3, path=paths[0]), StateCopy(20, path=paths[1])]
    assert folder.batch_splits() == [
        BatchSplit(0, (0,), ()),
        BatchSplit(5, (0, 1), (2, 5)),
        BatchSplit(9, (0, 1), (1, 6)),
    ]
    folder.make(resume=False)
    assert (folder.state_copies(), folder.batch_splits()) == ([], [])
    assert (folder.path / "checkpoints.1" / "best.ckpt").is_file()
