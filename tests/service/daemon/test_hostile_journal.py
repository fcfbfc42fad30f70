"""Journals with values that cannot be used: the daemon starts, names them, and fails the jobs they are about."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from contextlib import closing
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from carpool.core.journal import Header
from carpool.core.messages import AssignApplied, JobFailed, JobSubmitted, ProgressReported
from carpool.core.model import JobId, JobSpec
from carpool.core.scheduler import Scheduler
from carpool.jobs.devices import LocalDevice, as_cluster
from carpool.jobs.program import Program
from carpool.policies.registry import parse_policy
from carpool.runtime.executor.client_protocol import report_to_json
from carpool.runtime.executor.reports import Outcome, Sized
from carpool.service.daemon.bootstrap import DaemonInstance, DaemonOptions
from carpool.service.store.accept_log import AcceptLog, LogLine, read_log
from carpool.service.store.store import DATABASE, LOG, Store

DEVICES = tuple(LocalDevice(number, f"cpu:{number}", "cpu1", (number,)) for number in range(2))
BAD, GOOD = JobId("bad"), JobId("good")
HUGE = 10**400


def options(folder: Path) -> DaemonOptions:
    return DaemonOptions(folder, DEVICES, "1", "fifo", default_policy="fifo")


def write_store(folder: Path) -> None:
    """A store with two running jobs, one of which has reported its size and its progress."""
    header = Header("1", "fifo", as_cluster(DEVICES))
    with closing(Store.open(folder, header)) as store:
        scheduler = Scheduler(header.cluster, parse_policy("fifo"), observers=[store], find_policy=parse_policy)
        for job in (BAD, GOOD):
            store.detail(job, {"program": Program(entry="a.py:main").as_json()})
        scheduler.handle(0.0, [JobSubmitted(JobSpec(BAD)), JobSubmitted(JobSpec(GOOD))])
        scheduler.handle(1.0, [AssignApplied(BAD, 1, 0.0), AssignApplied(GOOD, 1, 0.0)])
        store.add_report(1.5, report_to_json(Sized(BAD, 100, 8)))
        scheduler.handle(2.0, [ProgressReported(BAD, 1, 5.0, 2.0, 0.5), ProgressReported(GOOD, 1, 5.0, 2.0, 0.5)])
        store.commit()


def rewrite(folder: Path, change: Callable[[int, dict[str, Any]], dict[str, Any]]) -> None:
    """Change the values of a journal; its checksums are right afterwards."""
    lines = read_log((folder / LOG).read_bytes()).lines
    written, before = [], 0
    for number in sorted(lines):
        body = json.dumps(change(number, json.loads(lines[number].body)), separators=(",", ":"))
        written.append(LogLine.after(before, number, body))
        before = written[-1].crc
    for suffix in ("", "-wal", "-shm"):
        (folder / f"{DATABASE}{suffix}").unlink(missing_ok=True)
    AcceptLog.write_anew(folder / LOG, written).close()


def in_last(path: tuple[Any, ...], value: object) -> Callable[[int, dict[str, Any]], dict[str, Any]]:
    """Replace one value of the last record."""

    def change(number: int, body: dict[str, Any]) -> dict[str, Any]:
        if number == 3:
            inner: Any = body
            for step in path[:-1]:
                inner = inner[step]
            inner[path[-1]] = value
        return body

    return change


HOSTILE = [
    (("notes", 0, 1, "total_steps"), HUGE),
    (("notes", 0, 1, "total_steps"), -5),
    (("notes", 0, 1, "batch_size"), "many"),
    (("notes", 0, 1, "report"), "Gossip"),
    (("record", "facts", 0, "rate"), float("inf")),
    (("record", "facts", 0, "done"), HUGE),
    (("record", "facts", 0, "done"), float("nan")),
    (("record", "facts", 0, "generation"), 2.5),
    (("record", "facts", 0, "extra"), 1),
    (("record", "facts", 0, "fact"), "JobVanished"),
]


@pytest.mark.parametrize(("path", "value"), HOSTILE, ids=lambda item: str(item)[:40])
def test_a_value_that_cannot_be_used_fails_its_job_alone(tmp_path: Path, path: tuple[Any, ...], value: object) -> None:
    write_store(tmp_path)
    rewrite(tmp_path, in_last(path, value))
    with closing(DaemonInstance.open(options(tmp_path))) as daemon:
        failures = [fact for fact in daemon._first if isinstance(fact, JobFailed)]
        assert [fact.job for fact in failures] == [BAD]
        assert "record 3" in failures[0].error
        assert any("record 3" in notice and "'bad'" in notice for notice in daemon.notices)
        assert set(daemon.scheduler.jobs) == {BAD, GOOD}
        assert daemon.scheduler.jobs[GOOD].done == 5.0
        daemon.scheduler.handle(3.0, failures)
        assert set(daemon.scheduler.jobs) == {GOOD}


def test_a_submission_that_cannot_be_used_is_skipped_with_all_that_follows_from_it(tmp_path: Path) -> None:
    write_store(tmp_path)

    def change(number: int, body: dict[str, Any]) -> dict[str, Any]:
        if number == 1:
            body["record"]["facts"][0]["spec"]["devices"] = HUGE
        return body

    rewrite(tmp_path, change)
    with closing(DaemonInstance.open(options(tmp_path))) as daemon:
        assert set(daemon.scheduler.jobs) == {GOOD}
        assert any("'bad'" in notice for notice in daemon.notices)
        daemon.scheduler.check()


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("body", [{}, {"record": None}, {"record": {"at": "now", "facts": 5}}, {"notes": 7}])
def test_a_record_of_another_form_is_skipped(tmp_path: Path, number: int, body: dict[str, Any]) -> None:
    write_store(tmp_path)
    rewrite(tmp_path, lambda each, old: dict(body) if each == number else old)
    with closing(DaemonInstance.open(options(tmp_path))) as daemon:
        assert any(f"record {number}" in notice for notice in daemon.notices)
        daemon.scheduler.check()


def test_a_snapshot_with_hostile_values_is_used_without_them(tmp_path: Path) -> None:
    write_store(tmp_path)
    with closing(DaemonInstance.open(options(tmp_path))) as daemon:
        state = daemon.scheduler.state()
        jobs = tuple(job._replace(rate=float("inf")) if job.id == BAD else job for job in state.jobs)
        details = {job: {"program": Program(entry="a.py:main").as_json()} for job in (BAD, GOOD)}
        details[GOOD]["sized"] = report_to_json(Sized(GOOD, HUGE))
        daemon.store.store_snapshot(state._replace(jobs=jobs), details)
    with closing(DaemonInstance.open(options(tmp_path))) as daemon:
        assert {fact.job for fact in daemon._first if isinstance(fact, JobFailed)} == {BAD, GOOD}
        assert daemon.scheduler.jobs[BAD].rate == 0.0


def test_an_old_outcome_with_a_hostile_number_is_skipped(tmp_path: Path) -> None:
    write_store(tmp_path)
    outcome = {**report_to_json(Outcome(BAD, 5, 1, 0.5)), "steps": HUGE}
    rewrite(tmp_path, in_last(("notes", 0, 1), outcome))
    with closing(DaemonInstance.open(options(tmp_path))) as daemon:
        assert daemon.observers.accounting.accounts[BAD].outcome is None


VALUES: st.SearchStrategy[object] = st.sampled_from(
    [HUGE, -1, 0, 1.5, float("inf"), float("nan"), None, "x", [], {}, True, [[1]], "é" * 9]
)


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    steps = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for step, inner in steps for place in [(*path, step), *_places(inner, (*path, step))]]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 30), values=st.lists(VALUES, min_size=1, max_size=3))
def test_the_daemon_starts_whatever_values_a_journal_holds(
    tmp_path_factory: pytest.TempPathFactory, seed: int, values: list[object]
) -> None:
    folder = tmp_path_factory.mktemp("store")
    write_store(folder)
    chance = random.Random(seed)

    def change(number: int, body: dict[str, Any]) -> dict[str, Any]:
        for value in values if number else ():
            place = chance.choice(_places(body))
            inner: Any = body
            for step in place[:-1]:
                inner = inner[step]
            inner[place[-1]] = deepcopy(value)  # a list in itself could not be written
        return body

    rewrite(folder, change)
    with closing(DaemonInstance.open(options(folder))) as daemon:
        daemon.scheduler.check()
        daemon.scheduler.handle(daemon.scheduler.at + 1.0, daemon._salvage.failures(daemon.scheduler.jobs))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None)
@given(flips=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 7)), min_size=1, max_size=8))
def test_the_daemon_starts_whatever_bits_of_the_log_are_flipped(
    tmp_path_factory: pytest.TempPathFactory, flips: list[tuple[float, int]]
) -> None:
    folder = tmp_path_factory.mktemp("store")
    write_store(folder)
    for suffix in ("", "-wal", "-shm"):
        (folder / f"{DATABASE}{suffix}").unlink(missing_ok=True)
    content = bytearray((folder / LOG).read_bytes())
    for place, bit in flips:
        content[int(place * len(content))] ^= 1 << bit
    (folder / LOG).write_bytes(content)
    with closing(DaemonInstance.open(options(folder))) as daemon:
        daemon.scheduler.check()
