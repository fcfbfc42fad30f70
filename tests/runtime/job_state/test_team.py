"""A team from its first order to its end, step by step."""

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
from tests.runtime.job_state.events import happen, patient, started
from tests.runtime.job_state.world import BATCH, EVALUATE_EVERY, TOTAL, World


def test_a_job_starts_works_and_finishes() -> None:
    world = started(True, 0, 1, 2)
    world.run()
    world.check_finish()
    assert world.facts[0] == AssignApplied(JobId("a"), 1, 0.0)
    assert [p.owners for p in world.formations[max(world.formations)]] == [((0, 3), (3, 6), (6, 8))] * 3


def test_like_devices_get_like_parts_and_unlike_ones_what_their_speed_says() -> None:
    like, unlike = started(False, 0, 1, 2), started(False, 0, 3)
    like.run()
    unlike.run()
    assert {p.parts for made in like.formations.values() for p in made} == {(12, 12, 12)}
    assert next(iter(unlike.formations.values()))[0].parts == (12, 24)
    # Measured: the second takes four times as long per sample.
    assert list(unlike.formations.values())[-1][0].parts == (29, 7)


def test_shards_of_unlike_devices_follow_their_speed_too() -> None:
    world = started(True, 0, 3)
    world.run()
    owners = [made[0].owners for made in world.formations.values()]
    assert owners[0] == ((0, 3), (3, 8))  # by their cores
    assert owners[-1] == ((0, 7), (7, 8))  # measured: the second takes four times as long per sample
    assert [words for words in world.stories if "shards" in words] == [
        "shards of a step on each device: cpu:0 3, cpu:3 5",
        "shards of a step on each device: cpu:0 7, cpu:3 1",
    ]


def test_equal_parts_of_an_exact_job_can_be_ordered() -> None:
    world = World(patient(True))
    world.order(0, 3, parts=(4, 4))
    world.run()
    assert {made[0].owners for made in world.formations.values()} == {((0, 4), (4, 8))}


def test_an_order_given_twice_or_late_is_ignored() -> None:
    world = started(True, 0)
    assert world.team.order(0.0, Target(1, (WorkerSlot(1),))) == []
    assert [worker.device for worker in world.living] == [0]


def test_release_keeps_the_state_and_a_new_order_goes_on_from_it() -> None:
    world = started(False, 0)
    for _ in range(8):
        happen(world, "both", 1)
    world.order()
    world.run()
    kept = world.facts[-1]
    assert isinstance(kept, ReleaseApplied)
    assert kept.done > 0
    world.order(1)
    world.run()
    assert AssignApplied(JobId("a"), 3, kept.done) in world.facts
    world.check_finish()


def test_release_of_what_never_ran_is_answered_at_once() -> None:
    world = started(False)
    assert world.facts == [ReleaseApplied(JobId("a"), 1, 0.0)]


def test_newcomers_warm_up_aside() -> None:
    world = started(True, 0)
    happen(world, "both", 4)
    world.order(0, 1)
    solo = world.workers[1]
    for _ in range(3):
        solo.act()
        world.hear(solo)
    assert solo.at == "working"
    assert solo.step > 0
    assert world.answers()[-1].generation == 1
    world.run()
    assert [fact.generation for fact in world.answers()] == [1, 2]


def test_in_exact_mode_survivors_go_on_before_the_replacement_is_there() -> None:
    world = started(True, 0, 1, 2)
    happen(world, "both", 12)
    world.workers[2].alive = False
    for _ in range(10):
        for worker in [world.workers[i] for i in (1, 2, 3)]:
            worker.act()
            world.hear(worker)
    assert {w.device for w in world.living} == {0, 1, 2}
    assert [p.size for p in world.formations[max(world.formations)]] == [2, 2]
    world.run()
    world.check_finish()


def test_in_default_mode_a_lost_worker_is_replaced_and_the_parts_stay() -> None:
    world = started(False, 0, 1, 2)
    happen(world, "both", 12)
    world.workers[2].alive = False
    world.run()
    assert set(world.check_finish()) == {(12, 12, 12)}


def test_steps_made_again_are_cut_as_the_first_time_between_unlike_devices_too() -> None:
    """The second worker is slower than its cores promise, so that parts are dealt anew on the way."""
    world = started(False, 0, 3)
    while world.team.done < TOTAL - 1:
        happen(world, "rounds", 1)
    before = max((worker.state for worker in world.living), key=len)
    assert len(set(before)) == 2, "parts have been dealt anew"
    for worker in world.living:
        worker.alive = False
    world.run()
    assert world.check_finish()[: len(before)] == before


def test_three_losses_without_a_step_fail_the_job() -> None:
    world = World(JobOptions(retries=3))
    world.order(0)
    for _ in range(3):
        while not world.formations or world.living[0].formation is None:
            happen(world, "both", 1)
        world.living[0].alive = False
        world.living[0].outbox.clear()
        happen(world, "both", 1)
    assert isinstance(world.facts[-1], JobFailed)
    assert "3 times" in world.facts[-1].error


def test_three_deaths_before_joining_fail_the_job() -> None:
    world = World(JobOptions(retries=3))
    world.order(0, 1)
    for _ in range(3):
        newcomer = next(worker for worker in world.living if worker.device == 0)
        newcomer.alive = False
        world.hear(newcomer)
    world.run()
    assert isinstance(world.facts[-1], JobFailed)


def test_unlike_initial_weights_fail_the_job() -> None:
    world = started(False, 0, 1)
    world.do(world.team.said(0.0, 1, Ready("one", 64, BATCH, TOTAL, 100)))
    world.do(world.team.said(0.0, 2, Ready("two", 64, BATCH, TOTAL, 100)))
    world.run()
    assert isinstance(world.facts[-1], JobFailed)
    assert "not deterministic" in world.facts[-1].error


@pytest.mark.parametrize("devices", [(0,), (0, 1)])
@pytest.mark.parametrize("exact", [False, True])
def test_with_nobody_to_decide_it_stands_still_with_its_state_on_disk_and_then_goes_on(
    exact: bool, devices: tuple[int, ...]
) -> None:
    world = started(exact, *devices)
    happen(world, "both", 12)
    world.do(world.team.wait(world.at, waits=True))
    happen(world, "rounds", 12)
    assert world.team.is_still
    stood = world.team.done
    assert 0 < stood < TOTAL
    assert len(world.disk[0]) == stood
    happen(world, "rounds", 12)
    world.tick(100.0)
    assert (world.team.done, len(world.disk[0])) == (stood, stood), "no step is made, and nothing is written twice"
    before = list(world.answers())
    world.do(world.team.wait(world.at, waits=False))
    world.run()
    assert len(world.check_finish()) == TOTAL
    assert world.answers() == before, "the scheduler need not hear of it"


def test_a_full_disk_is_told_once_while_it_waits() -> None:
    world = started(False, 0)
    happen(world, "both", 4)
    world.do(world.team.wait(world.at, waits=True))
    happen(world, "rounds", 2)
    world.do(world.team.said(0.0, 1, WorkerFailed("disk", "the disk is full", 2)))
    happen(world, "rounds", 6)
    assert sum("disk is full" in words for words in world.stories) == 1
    world.do(world.team.wait(world.at, waits=False))
    world.run()
    world.check_finish()


def test_a_full_disk_is_told_and_training_goes_on() -> None:
    world = started(False, 0)
    happen(world, "both", 4)
    world.do(world.team.said(0.0, 1, WorkerFailed("disk", "the disk is full", 2)))
    world.run()
    world.check_finish()
    assert any("disk is full" in words for words in world.stories)


def test_an_error_of_the_users_fails_the_job_under_the_generation_it_ran_in() -> None:
    world = started(False, 0)
    happen(world, "both", 4)
    world.do(world.team.said(0.0, 1, WorkerFailed("user", "ZeroDivisionError: division by zero", 2)))
    world.run()
    assert world.facts[-1] == JobFailed(JobId("a"), 1, "ZeroDivisionError: division by zero (on cpu:0, step 2)")


def test_a_time_limit_ends_the_job() -> None:
    world = started(False, 0, time_limit_s=3.0)
    happen(world, "both", 4)
    world.tick(2.0)
    world.tick(2.0)
    world.run()
    assert isinstance(world.facts[-1], JobFailed)
    assert "3 s" in world.facts[-1].error


def test_a_damaged_checkpoint_gives_way_to_an_older_one() -> None:
    world = World(patient(True), checkpoints=[StateCopy(3, path="old"), StateCopy(6, path="new")])
    world.disk = (("shards",) * 3, False)
    world.order(0)
    world.workers[1].act()
    world.hear(world.workers[1])
    assert world.workers[1].inbox.popleft()[0] == Load("new")
    world.do(world.team.said(0.0, 1, WorkerFailed("input", "damaged")))
    assert world.workers[1].inbox[0][0] == Load("old")
    world.run()
    world.check_finish()


def test_a_newcomer_enters_with_one_change_of_formation() -> None:
    world = started(True, 0)
    happen(world, "rounds", 4)
    world.order(0, 1)
    solo, newcomer = world.living
    for worker in (newcomer, solo, solo):  # it is ready, the other halts and publishes
        worker.act()
        while worker.outbox:
            world.hear(worker)
    assert [type(message) for message, _ in newcomer.inbox] == [Load]
    world.tick(0.0)
    assert world.team.formation is None, "the others wait for it"
    world.run()
    world.check_finish()
    assert [proceeds[0].size for proceeds in world.formations.values()] == [1, 2]


def test_a_state_from_before_its_evaluation_is_handed_on_with_what_was_measured() -> None:
    world = World(patient(False), checkpoints=[StateCopy(EVALUATE_EVERY, path="x")])
    world.disk = (((18, 18),) * EVALUATE_EVERY, True)
    world.order(0, 1)
    first, second = world.workers[1], world.workers[2]
    while first.due or not first.state:
        happen(world, "both", 2)
    assert first.step == EVALUATE_EVERY
    second.alive = False
    world.run()
    world.check_finish()
