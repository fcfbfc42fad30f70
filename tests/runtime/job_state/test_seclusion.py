"""A team that has to be alone: for a step that ran out of memory, and to be measured."""

from __future__ import annotations

import pytest

from carpool.core.messages import JobFailed, ProgressReported
from carpool.runtime.job_state.actions import (
    MicroBatchLimit,
)
from carpool.runtime.process.protocol import (
    Ready,
    Stepped,
)
from tests.runtime.job_state.events import happen, patient, started
from tests.runtime.job_state.world import BATCH, TOTAL, World


def test_out_of_memory_is_tried_again_while_the_neighbours_stand_still() -> None:
    world = started(False, 0)
    happen(world, "both", 4)
    world.living[0].short = True
    while not world.alone:
        happen(world, "both", 1)
    assert world.alone == 1
    world.run()
    world.check_finish()
    assert not any("micro-steps" in words for words in world.stories)


def test_what_runs_out_of_memory_even_alone_is_split_until_it_fits() -> None:
    world = started(False, 0)
    happen(world, "both", 6)
    step = world.living[0].step
    world.living[0].short_above = 10
    world.run()
    world.check_finish()
    assert [words.partition("alone: ")[2] for words in world.stories if "micro" in words] == [
        "split into 2 micro-steps of 18 samples; rounding differs",
        "split into 4 micro-steps of 9 samples; rounding differs",
    ]
    splits = [what for what in world.written if isinstance(what, MicroBatchLimit)]
    assert splits == [MicroBatchLimit(step, 18), MicroBatchLimit(step, 9)]
    assert world.formations[max(world.formations)][0].limits == ((step, 18), (step, 9))


def test_after_a_resume_it_stays_split() -> None:
    world = World(patient(False), splits=[MicroBatchLimit(3, 9)])
    world.order(0)
    while not world.living or world.living[0].formation is None:
        happen(world, "both", 1)
    world.run()
    assert world.formations[min(world.formations)][0].limits == ((3, 9),)
    assert not world.stories


@pytest.mark.parametrize(
    ("exact", "batch_norm", "fits", "words"),
    [
        (
            True,
            False,
            10,
            "exact job is not split into micro-steps, which would change its bits: lower batch_size (36)",
        ),
        (False, True, 10, "A batch-normalised job is not split"),
        (False, False, 0, "Not even a single sample fits"),
    ],
)
def test_what_may_not_be_split_fails_with_memory_value_and_way_out(
    exact: bool, batch_norm: bool, fits: int, words: str
) -> None:
    world = started(exact, 0)
    world.do(world.team.said(0.0, 1, Ready("initial", 64, BATCH, TOTAL, 100, has_batch_norm=batch_norm)))
    world.living[0].at = "resting"
    world.living[0].short_above = fits
    world.run()
    assert isinstance(world.facts[-1], JobFailed)
    assert "step 1 of 36 samples needs more memory than cpu:0 has (2.0 GiB), even alone: never enough" in (
        world.facts[-1].error
    )
    assert words in world.facts[-1].error


def test_a_probe_is_not_measured_again_after_a_loss() -> None:
    world = World(patient(False))
    world.order(0, probe=4)
    happen(world, "both", 4)
    happen(world, "alone", 0)
    happen(world, "both", 4)
    world.living[0].alive = False
    happen(world, "both", 4)
    happen(world, "both", 4)
    world.do(world.team.said(world.at, world.living[0].id, Stepped(8, 0, 0.5, 1.0, 1.0, probed=True)))
    world.living[0].alive = False
    world.run()
    assert [proceeds[0].probe for _, proceeds in sorted(world.formations.items())] == [4, 4, 0]
    world.check_finish()


def test_neighbours_stand_still_while_a_probe_is_measured() -> None:
    world = World(patient(False))
    world.order(0)
    happen(world, "both", 12)
    world.order(0, probe=4)
    happen(world, "both", 4)
    assert (world.alone, world.team.is_still) == (1, True)  # it waits for them
    happen(world, "alone", 0)
    happen(world, "both", 2)
    assert (world.alone, world.team.is_still) == (1, False)
    world.do(world.team.said(world.at, world.living[0].id, Stepped(20, 0, 0.5, 1.0, 3.0, probed=True)))
    assert world.alone == 0
    (told,) = [fact for fact in world.facts if isinstance(fact, ProgressReported) and fact.alone]
    assert told.rate == 3.0
    world.run()
    world.check_finish()


@pytest.mark.parametrize("instead", [(), (0,), (1,)])
def test_a_probe_that_is_no_longer_wished_lets_the_neighbours_go_on(instead: tuple[int, ...]) -> None:
    world = World(patient(False))
    world.order(0, probe=4)
    happen(world, "both", 4)
    assert world.alone == 1
    world.order(*instead)
    happen(world, "both", 30)
    assert world.alone == 0


def test_who_stands_still_for_a_measurement_keeps_its_memory() -> None:
    world = started(False, 0)
    happen(world, "both", 12)
    world.do(world.team.hold(world.at, held=True, clears=False))
    for _ in range(12):
        happen(world, "rounds", 1)
    assert (world.team.is_still, world.team.has_made_room) == (True, False)


def test_who_stands_still_for_a_neighbour_gives_its_memory_back_first() -> None:
    world = started(False, 0, 1)
    happen(world, "both", 12)
    world.do(world.team.hold(world.at, held=True))
    seen: list[tuple[bool, bool]] = []  # stands still, has made room
    for _ in range(12):
        happen(world, "rounds", 1)
        seen.append((world.team.is_still, world.team.has_made_room))
    assert list(dict.fromkeys(seen)) == [(False, False), (True, False), (True, True)]
    world.do(world.team.hold(world.at, held=False))
    world.run()
    world.check_finish()
