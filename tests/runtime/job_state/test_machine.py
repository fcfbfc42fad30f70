"""The state machine from the first order to the end of the job."""

from __future__ import annotations

import pytest

from carpool.core.messages import AssignApplied, JobFailed, ReleaseApplied
from carpool.core.model import JobId
from carpool.runtime.job_state.types import JobOptions, StateCopy, Target, WorkerSlot
from carpool.runtime.process.protocol import (
    Load,
    Ready,
    WorkerFailed,
)
from tests.runtime.job_state.events import happen, options, started
from tests.runtime.job_state.harness import BATCH, EVALUATE_EVERY, TOTAL, Harness


def test_a_job_starts_runs_and_finishes() -> None:
    harness = started(True, 0, 1, 2)
    harness.run()
    harness.check_finish()
    assert harness.facts[0] == AssignApplied(JobId("a"), 1, 0.0)
    assert [p.owners for p in harness.epochs[max(harness.epochs)]] == [((0, 3), (3, 6), (6, 8))] * 3


def test_equal_devices_get_equal_parts_and_others_parts_by_speed() -> None:
    like, unlike = started(False, 0, 1, 2), started(False, 0, 3)
    like.run()
    unlike.run()
    assert {p.parts for made in like.epochs.values() for p in made} == {(12, 12, 12)}
    assert next(iter(unlike.epochs.values()))[0].parts == (12, 24)
    # Measured: the second takes four times as long per sample.
    assert list(unlike.epochs.values())[-1][0].parts == (29, 7)


def test_shards_on_heterogeneous_devices_follow_measured_speed() -> None:
    harness = started(True, 0, 3)
    harness.run()
    owners = [made[0].owners for made in harness.epochs.values()]
    assert owners[0] == ((0, 4), (4, 8))  # one core each
    assert owners[-1] == ((0, 7), (7, 8))  # measured: the second takes four times as long per sample
    assert [text for text in harness.notes if "shards" in text] == [
        "shards per device: cpu:0 4, cpu:3 4",
        "shards per device: cpu:0 7, cpu:3 1",
    ]


def test_equal_parts_of_an_exact_job_can_be_ordered() -> None:
    harness = Harness(options(True))
    harness.order(0, 3, parts=(4, 4))
    harness.run()
    assert {made[0].owners for made in harness.epochs.values()} == {((0, 4), (4, 8))}


def test_an_order_given_twice_or_late_is_ignored() -> None:
    harness = started(True, 0)
    assert harness.machine.order(0.0, Target(1, (WorkerSlot(1),))) == []
    assert [worker.device for worker in harness.alive_workers] == [0]


def test_release_keeps_the_state_for_the_next_assignment() -> None:
    harness = started(False, 0)
    for _ in range(8):
        happen(harness, "both", 1)
    harness.order()
    harness.run()
    kept = harness.facts[-1]
    assert isinstance(kept, ReleaseApplied)
    assert kept.done > 0
    harness.order(1)
    harness.run()
    assert AssignApplied(JobId("a"), 3, kept.done) in harness.facts
    harness.check_finish()


def test_release_of_a_job_that_never_ran_is_acknowledged_at_once() -> None:
    harness = started(False)
    assert harness.facts == [ReleaseApplied(JobId("a"), 1, 0.0)]


def test_new_workers_start_while_the_others_run() -> None:
    harness = started(True, 0)
    happen(harness, "both", 4)
    harness.order(0, 1)
    solo = harness.workers[1]
    for _ in range(3):
        solo.act()
        harness.deliver(solo)
    assert solo.at == "working"
    assert solo.step > 0
    assert harness.acks()[-1].generation == 1
    harness.run()
    assert [fact.generation for fact in harness.acks()] == [1, 2]


def test_in_exact_mode_the_others_continue_before_a_lost_worker_is_replaced() -> None:
    harness = started(True, 0, 1, 2)
    happen(harness, "both", 12)
    harness.workers[2].alive = False
    for _ in range(10):
        for worker in [harness.workers[i] for i in (1, 2, 3)]:
            worker.act()
            harness.deliver(worker)
    assert {w.device for w in harness.alive_workers} == {0, 1, 2}
    assert [p.size for p in harness.epochs[max(harness.epochs)]] == [2, 2]
    harness.run()
    harness.check_finish()


def test_in_default_mode_a_lost_worker_is_replaced_and_the_parts_stay() -> None:
    harness = started(False, 0, 1, 2)
    happen(harness, "both", 12)
    harness.workers[2].alive = False
    harness.run()
    assert set(harness.check_finish()) == {(12, 12, 12)}


def test_replayed_steps_are_split_as_the_first_time_on_heterogeneous_devices() -> None:
    """The second worker is slower than its cores suggest, so the split changes on the way."""
    harness = started(False, 0, 3)
    while harness.state.steps_done < TOTAL - 1:
        happen(harness, "rounds", 1)
    before = max((worker.state for worker in harness.alive_workers), key=len)
    assert len(set(before)) == 2, "the split has changed"
    for worker in harness.alive_workers:
        worker.alive = False
    harness.run()
    assert harness.check_finish()[: len(before)] == before


@pytest.mark.parametrize("retries", [0, 1, 2])
def test_a_job_fails_once_its_retries_without_a_step_are_used_up(retries: int) -> None:
    harness = Harness(JobOptions(retries=retries))
    harness.order(0)
    for _ in range(retries + 1):
        assert not any(isinstance(fact, JobFailed) for fact in harness.facts)
        while not harness.epochs or harness.alive_workers[0].proceed is None:
            happen(harness, "both", 1)
        harness.alive_workers[0].alive = False
        harness.alive_workers[0].outbox.clear()
        happen(harness, "both", 1)
    assert isinstance(harness.facts[-1], JobFailed)
    assert f"{retries + 1} times" in harness.facts[-1].error


def test_three_losses_before_joining_fail_the_job() -> None:
    harness = Harness(JobOptions(retries=2))
    harness.order(0, 1)
    for _ in range(3):
        new_worker = next(worker for worker in harness.alive_workers if worker.device == 0)
        new_worker.alive = False
        harness.deliver(new_worker)
    harness.run()
    assert isinstance(harness.facts[-1], JobFailed)


def test_different_initial_weights_fail_the_job() -> None:
    harness = started(False, 0, 1)
    harness.run_actions(harness.machine.message(0.0, 1, Ready("one", 64, BATCH, TOTAL, 100)))
    harness.run_actions(harness.machine.message(0.0, 2, Ready("two", 64, BATCH, TOTAL, 100)))
    harness.run()
    assert isinstance(harness.facts[-1], JobFailed)
    assert "not deterministic" in harness.facts[-1].error


@pytest.mark.parametrize("devices", [(0,), (0, 1)])
@pytest.mark.parametrize("exact", [False, True])
def test_a_suspended_job_is_idle_with_its_state_on_disk_and_then_continues(
    exact: bool, devices: tuple[int, ...]
) -> None:
    harness = started(exact, *devices)
    happen(harness, "both", 12)
    harness.run_actions(harness.machine.suspend(harness.at, suspended=True))
    happen(harness, "rounds", 12)
    assert harness.state.is_idle
    stood = harness.state.steps_done
    assert 0 < stood < TOTAL
    assert len(harness.disk[0]) == stood
    happen(harness, "rounds", 12)
    harness.tick(100.0)
    assert (harness.state.steps_done, len(harness.disk[0])) == (stood, stood), (
        "no step is made, and nothing is written twice"
    )
    before = list(harness.acks())
    harness.run_actions(harness.machine.suspend(harness.at, suspended=False))
    harness.run()
    assert len(harness.check_finish()) == TOTAL
    assert harness.acks() == before, "no acknowledgement is sent"


def test_a_full_disk_is_noted_once_while_suspended() -> None:
    harness = started(False, 0)
    happen(harness, "both", 4)
    harness.run_actions(harness.machine.suspend(harness.at, suspended=True))
    happen(harness, "rounds", 2)
    harness.run_actions(harness.machine.message(0.0, 1, WorkerFailed("disk", "the disk is full", 2)))
    happen(harness, "rounds", 6)
    assert sum("disk is full" in text for text in harness.notes) == 1
    harness.run_actions(harness.machine.suspend(harness.at, suspended=False))
    harness.run()
    harness.check_finish()


def test_a_full_disk_is_noted_and_training_continues() -> None:
    harness = started(False, 0)
    happen(harness, "both", 4)
    harness.run_actions(harness.machine.message(0.0, 1, WorkerFailed("disk", "the disk is full", 2)))
    harness.run()
    harness.check_finish()
    assert any("disk is full" in text for text in harness.notes)


def test_a_user_error_fails_the_job_in_the_acknowledged_generation() -> None:
    harness = started(False, 0)
    happen(harness, "both", 4)
    harness.run_actions(harness.machine.message(0.0, 1, WorkerFailed("user", "ZeroDivisionError: sharding by zero", 2)))
    harness.run()
    assert harness.facts[-1] == JobFailed(JobId("a"), 1, "ZeroDivisionError: sharding by zero (on cpu:0, step 2)")


def test_a_time_limit_ends_the_job() -> None:
    harness = started(False, 0, time_limit_s=3.0)
    happen(harness, "both", 4)
    harness.tick(2.0)
    harness.tick(2.0)
    harness.run()
    assert isinstance(harness.facts[-1], JobFailed)
    assert "3 s" in harness.facts[-1].error


def test_a_damaged_checkpoint_falls_back_to_an_older_one() -> None:
    harness = Harness(options(True), checkpoints=[StateCopy(3, path="old"), StateCopy(6, path="new")])
    harness.disk = (("shards",) * 3, False)
    harness.order(0)
    harness.workers[1].act()
    harness.deliver(harness.workers[1])
    assert harness.workers[1].inbox.popleft()[0] == Load("new")
    harness.run_actions(harness.machine.message(0.0, 1, WorkerFailed("input", "damaged")))
    assert harness.workers[1].inbox[0][0] == Load("old")
    harness.run()
    harness.check_finish()


def test_a_new_worker_joins_with_one_new_epoch() -> None:
    harness = started(True, 0)
    happen(harness, "rounds", 4)
    harness.order(0, 1)
    solo, new_worker = harness.alive_workers
    for worker in (new_worker, solo, solo):  # it is ready, the other halts and publishes
        worker.act()
        while worker.outbox:
            harness.deliver(worker)
    assert [type(message) for message, _ in new_worker.inbox] == [Load]
    harness.tick(0.0)
    assert harness.state.epoch is None, "the other worker waits for it"
    harness.run()
    harness.check_finish()
    assert [proceeds[0].size for proceeds in harness.epochs.values()] == [1, 2]


def test_a_copy_from_before_its_evaluation_is_loaded_with_the_metrics() -> None:
    harness = Harness(options(False), checkpoints=[StateCopy(EVALUATE_EVERY, path="x")])
    harness.disk = (((18, 18),) * EVALUATE_EVERY, True)
    harness.order(0, 1)
    first, second = harness.workers[1], harness.workers[2]
    while first.due or not first.state:
        happen(harness, "both", 2)
    assert first.step == EVALUATE_EVERY
    second.alive = False
    harness.run()
    harness.check_finish()
