"""The files of a job's folder, which the job can replace by anything."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from carpool.backends.metric_summary import read_metric_reports, read_summaries
from carpool.backends.run_folder import RunFolder
from carpool.core.messages import Assign, AssignApplied, JobFailed
from carpool.core.model import Allocation, JobId
from carpool.core.typed_fields import MAX_INT
from carpool.jobs.program import Program
from carpool.runtime.executor.client_protocol import ExecutorOptions
from carpool.runtime.executor.executor import Executor
from carpool.runtime.executor.job_folder import JobFolder
from carpool.runtime.executor.reports import Facts, Outcome, Report, Told
from carpool.runtime.job_state.actions import BatchSplit
from carpool.service.queries.present import TimeBase, read_curve, read_log
from tests.runtime.executor.test_executor import DEVICES, READY, FakePool, close_files

BAD, GOOD = JobId("bad"), JobId("good")
KEYS = st.sampled_from(
    ["schema", "step", "devices", "parts", "samples", "loss", "metrics", "at_s", "job", "steps", "reason"]
)
Replace = Callable[[Path], object]


def _huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


REPLACEMENTS: dict[str, Replace] = {
    "junk": lambda path: path.write_bytes(b"\xff\x00junk\n[[[\n" + b"[" * 10_000 + b"\n{}\n7\n"),
    "hostile": lambda path: path.write_text('{"step": ' + "9" * 400 + ', "devices": [], "parts": []}\n'),
    "fifo": os.mkfifo,
    "link": lambda path: path.symlink_to("/dev/zero"),
    "folder": lambda path: (path / "inner").mkdir(parents=True),
    "device": lambda path: path.symlink_to("/dev/full"),
    "huge": _huge,
}
FILES = ["log", "cuts.jsonl", "splits.jsonl", "checkpoints", "metrics.jsonl", "outcome.json"]


@pytest.mark.parametrize("replace", REPLACEMENTS.values(), ids=REPLACEMENTS)
@pytest.mark.parametrize("name", FILES)
def test_whatever_a_file_is_replaced_by_the_executor_and_the_neighbour_go_on(
    tmp_path: Path, name: str, replace: Replace
) -> None:
    folder = JobFolder(tmp_path, BAD).path
    folder.mkdir(parents=True)
    replace(folder / name)
    reports: list[Report] = []
    pool = FakePool()
    executor = Executor(DEVICES, tmp_path, ExecutorOptions(), reports.append, pool.dependencies())
    executor.add_job(BAD, Program(entry="jobs.py:tiny"), resume=True)
    executor.add_job(GOOD, Program(entry="jobs.py:tiny"), resume=False)
    executor.apply_orders([Assign(BAD, Allocation.of(0), 1), Assign(GOOD, Allocation.of(1), 1)])
    executor.tick()
    executor.workers.on_message(next(key for key in pool.launched if key[0] == GOOD), READY)
    facts = [fact for report in reports if isinstance(report, Facts) for fact in report.facts]
    assert AssignApplied(GOOD, 1, 0.0) in facts
    assert not [fact for fact in facts if isinstance(fact, JobFailed) and fact.job == GOOD]
    assert read_log(folder / "log", 0, 1000, is_over=False).next >= 0
    assert not read_curve(folder / "metrics.jsonl", TimeBase(0.0), 100)
    close_files(executor)


@pytest.mark.parametrize("name", [name for name in REPLACEMENTS if name != "folder"])
def test_an_outcome_is_written_whatever_takes_the_place_of_its_draft(tmp_path: Path, name: str) -> None:
    run = RunFolder(tmp_path)
    run.job(BAD).mkdir(parents=True)
    REPLACEMENTS[name](run.job(BAD) / ".outcome.json.part")
    run.write_outcome(Outcome(BAD, steps=7, epochs=1, loss=None))
    outcome = run.outcome(BAD)
    assert outcome is not None
    assert outcome.steps == 7


def test_junk_lines_are_skipped_and_named_once(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path, BAD)
    folder.make(resume=False)
    good = [BatchSplit(3, (0, 1), (4, 4)), BatchSplit(9, (0,), (8,))]
    folder.write(good[0])
    with (folder.path / "cuts.jsonl").open("ab") as file:
        file.write(b'junk\n{"step": -1, "devices": [0], "parts": [8]}\n')
    folder.write(good[1])
    reports: list[Report] = []
    executor = Executor(DEVICES, tmp_path, ExecutorOptions(), reports.append, FakePool().dependencies())
    executor.add_job(BAD, Program(entry="jobs.py:tiny"), resume=True)
    for _ in range(3):
        executor.tick()
    told = [report.words for report in reports if isinstance(report, Told)]
    assert len(told) == 1
    assert "cuts.jsonl" in told[0]
    lines = (folder.path / "cuts.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["step"] for line in lines] == [3, 9]


def test_the_oldest_part_of_a_long_log_is_discarded_and_readers_go_on(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path, BAD)
    folder.make(resume=False)
    kept = 1 << 16
    line = b"%07d\n"
    content = b"".join(line % number for number in range(5 * kept // 8))
    os.write(folder.log(), content[: 3 * kept])
    folder.trim_log(kept)
    path = folder.path / "log"
    assert path.stat().st_size == 3 * kept, "offsets stay valid"
    assert path.stat().st_blocks * 512 <= 2 * kept
    chunk = read_log(path, 0, 1 << 18, is_over=False)
    assert chunk.start > 0
    assert chunk.text.encode() == content[chunk.start : 3 * kept]
    os.write(folder.log(), content[3 * kept :])
    folder.trim_log(kept)
    assert path.stat().st_blocks * 512 <= 2 * kept
    following = read_log(path, chunk.next, 1 << 18, is_over=False)
    assert following.text.encode() == content[following.start :]
    assert len(folder.take_problems()) == 1
    folder.close()


def test_a_log_is_truncated_where_the_file_system_has_no_holes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(handle: int, first: int, stop: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("carpool.runtime.executor.job_folder.punch_hole", refuse)
    folder = JobFolder(tmp_path, BAD)
    folder.make(resume=False)
    os.write(folder.log(), b"x" * 5000)
    folder.trim_log(1024)
    os.write(folder.log(), b"end")
    assert (folder.path / "log").read_bytes() == b"end"
    folder.close()


LINES = st.lists(
    st.binary(max_size=40)
    | st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just(10**400),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=5),
        max_leaves=8,
    ).map(lambda value: json.dumps(value).encode()),
    max_size=8,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    name=st.sampled_from(["cuts.jsonl", "splits.jsonl", "metrics.jsonl", "story.jsonl", "outcome.json"]), lines=LINES
)
def test_any_lines_in_a_file_of_a_job_are_values_within_their_ranges_or_are_skipped(
    tmp_path: Path, name: str, lines: list[bytes]
) -> None:
    run = RunFolder(tmp_path)
    folder = JobFolder(tmp_path, BAD)
    folder.path.mkdir(parents=True, exist_ok=True)
    (folder.path / name).write_bytes(b"\n".join(lines))
    steps = [split.step for split in folder.batch_splits()] + [limit.step for limit in folder.micro_batch_limits()]
    steps += [report.step for report in read_metric_reports(folder.path / "metrics.jsonl")]
    outcome = run.outcome(BAD)
    steps += [] if outcome is None else [outcome.steps]
    assert all(0 <= step <= MAX_INT for step in steps)
    assert read_summaries(folder.path / "metrics.jsonl").last_step <= MAX_INT
    assert all(isinstance(row, dict) for row in run.rows(BAD, "story.jsonl"))
    assert all(0 <= point.step <= MAX_INT for point in read_curve(folder.path / "metrics.jsonl", TimeBase(0.0), 10))


@pytest.mark.parametrize("replace", REPLACEMENTS.values(), ids=REPLACEMENTS)
def test_metrics_that_are_no_file_are_none(tmp_path: Path, replace: Replace) -> None:
    replace(tmp_path / "metrics.jsonl")
    assert not list(read_metric_reports(tmp_path / "metrics.jsonl"))
