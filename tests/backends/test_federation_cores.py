"""Devices of several cores: their tasks run side by side, with the updates of the tasks in turn."""

from pathlib import Path
from typing import Any

import pytest

from carpool.backends.federation_run import TaskSummary
from carpool.core.errors import InputError
from carpool.federated.federation import TaskName
from carpool.federated.federation_file import FederationFile
from carpool.federated.messages import DeviceLost, Outcome, Record, TaskResult, WorkReported
from tests.backends.test_federation_run import federation
from tests.support.federation_runs import Runs

SHAPES: tuple[dict[str, Any], ...] = ({}, {"hidden": 4}, {"hidden": 16, "lr": 0.2})


def three_tasks(folder: Path, cores: int, **more: Any) -> FederationFile:
    tasks = [
        {"name": f"task-{number}", "entry": "entries.py:make", "args": shape, "partition": {"scheme": "labels"}}
        for number, shape in enumerate(SHAPES)
    ]
    return federation(folder, tasks, device=[{"name": "device", "count": 2, "slowdown": 1, "cores": cores}], **more)


def digests(summaries: dict[TaskName, TaskSummary]) -> list[str]:
    assert not any(each.failed for each in summaries.values())
    return [each.digest for each in summaries.values()]


def results(records: list[Record]) -> list[TaskResult]:
    reported = [fact for record in records for fact in record.facts if isinstance(fact, WorkReported)]
    return [result for fact in reported for result in fact.results]


def test_side_by_side_updates_are_those_in_turn(tmp_path: Path, run: Runs) -> None:
    """With a core for every task, and with fewer cores than tasks."""
    in_turn, _ = run(three_tasks(tmp_path, 1), tmp_path / "1")
    for cores in (2, 3):
        found, records = run(three_tasks(tmp_path, cores), tmp_path / str(cores))
        assert digests(found) == digests(in_turn)
        assert {result.outcome for result in results(records)} == {Outcome.ACCEPTED}


def test_balanced_plans_count_on_all_cores(tmp_path: Path, run: Runs) -> None:
    """The device with three cores does its tasks in a third of the time, so that it gets the more work."""
    file = three_tasks(tmp_path, 1, plan="balanced", rounds=2)
    devices = [{"name": "wide", "slowdown": 1, "cores": 3}, {"name": "narrow", "slowdown": 1}]
    mixed = federation(
        tmp_path,
        [{"name": task.name, "entry": "entries.py:make"} for task in file.federation.tasks],
        plan="balanced",
        device=devices,
    )
    _, records = run(mixed, tmp_path / "run")
    reported = [fact for record in records for fact in record.facts if isinstance(fact, WorkReported)]
    samples = dict.fromkeys(("wide", "narrow"), 0)
    for fact in reported:
        samples[fact.device] += sum(result.samples for result in fact.results)
    assert samples["wide"] > 1.5 * samples["narrow"]


def test_tasks_run_at_the_same_time(tmp_path: Path, run: Runs) -> None:
    """Each step waits until the other task has begun its first, which in turn it never would."""
    tasks = [
        {"name": own, "entry": "entries.py:meets", "args": {"own": str(tmp_path / own), "other": str(tmp_path / other)}}
        for own, other in (("a", "b"), ("b", "a"))
    ]
    file = federation(tmp_path, tasks, rounds=1, device=[{"name": "device", "cores": 2}])
    summaries, records = run(file, tmp_path / "run")
    assert not any(each.failed for each in summaries.values())
    assert {result.outcome for result in results(records)} == {Outcome.ACCEPTED}


def test_a_task_that_dies_ends_its_device_which_works_again(tmp_path: Path, run: Runs) -> None:
    tasks: list[dict[str, Any]] = [
        {"name": "a", "entry": "entries.py:dies_once", "args": {"flag": str(tmp_path / "flag")}},
        {"name": "b", "entry": "entries.py:make"},
    ]
    file = federation(tmp_path, tasks, device=[{"name": "device", "slowdown": 1, "cores": 2}])
    summaries, records = run(file, tmp_path / "run")
    lost = [fact for record in records for fact in record.facts if isinstance(fact, DeviceLost)]
    assert [fact.device for fact in lost] == ["device"]
    again, _ = run(file, tmp_path / "again")  # it does not die again
    assert digests(again) == digests(summaries)


def test_a_task_that_fails_leaves_the_others_alone(tmp_path: Path, run: Runs) -> None:
    tasks = [{"name": "bad", "entry": "entries.py:fails"}, {"name": "good", "entry": "entries.py:make"}]
    file = federation(tmp_path, tasks, device=[{"name": "device", "slowdown": 1, "cores": 2}])
    summaries, _ = run(file, tmp_path / "run")
    assert {name: each.failed for name, each in summaries.items()} == {"bad": True, "good": False}


def test_at_a_deadline_all_tasks_of_a_core_return_partial_work(tmp_path: Path, run: Runs) -> None:
    file = three_tasks(tmp_path, 2, epochs=100_000.0, deadline_s=0.6, rounds=1)
    summaries, records = run(file, tmp_path / "run")
    assert {each.rounds for each in summaries.values()} == {1}
    found = results(records)
    assert len(found) == 6
    assert all(0 < result.samples < 1_000_000 for result in found)


def test_a_hung_task_is_lost_at_its_deadline_and_the_device_comes_back(tmp_path: Path, run: Runs) -> None:
    tasks: list[dict[str, Any]] = [
        {"name": "a", "entry": "entries.py:hangs_in_a_step", "args": {"flag": str(tmp_path / "flag")}},
        {"name": "b", "entry": "entries.py:make"},
    ]
    devices = [{"name": "device", "count": 2, "cores": 2}]
    file = federation(tmp_path, tasks, rounds=30, device=devices, deadline_s=0.3, grace_s=0.2)
    summaries, records = run(file, tmp_path / "run")
    assert {(each.rounds, each.failed) for each in summaries.values()} == {(30, False)}
    lost = {fact.device for record in records for fact in record.facts if isinstance(fact, DeviceLost)}
    assert len(lost) == 1


def test_an_entry_that_raises_is_bad_input(tmp_path: Path, run: Runs) -> None:
    tasks = [{"name": "a", "entry": "entries.py:no_entry"}, {"name": "b", "entry": "entries.py:make"}]
    with pytest.raises(InputError, match="missing data"):
        run(federation(tmp_path, tasks, device=[{"name": "device", "cores": 2}]), tmp_path / "run")


def test_a_real_device_cannot_have_more_cores_than_the_machine(tmp_path: Path, run: Runs) -> None:
    file = federation(tmp_path, [{"name": "a", "entry": "entries.py:make"}], device=[{"name": "big", "cores": 1024}])
    with pytest.raises(InputError, match="has cores = 1024, and"):
        run(file, tmp_path / "run")
