"""A team against pretended workers: any order of events, any faults, and it goes on."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from carpool.runtime.job_state.types import StateCopy
from carpool.runtime.job_state.update_sharding import UpdateSharding
from tests.runtime.job_state.events import happen, patient, started
from tests.runtime.job_state.world import DEVICES, TOTAL, World

SEATS = st.lists(st.sampled_from(sorted(DEVICES)), max_size=4, unique=True)
EVENTS = st.one_of(
    st.tuples(st.just("act"), st.integers(0, 5)),
    st.tuples(st.just("act"), st.integers(0, 5)),
    st.tuples(st.just("hear"), st.integers(0, 5)),
    st.tuples(st.just("hear"), st.integers(0, 5)),
    st.tuples(st.just("rounds"), st.integers(1, 8)),
    st.tuples(st.just("rounds"), st.integers(1, 8)),
    st.tuples(st.just("rounds"), st.integers(1, 8)),
    st.tuples(st.just("order"), SEATS),
    st.tuples(st.just("kill"), st.integers(0, 5)),
    st.tuples(st.just("hang"), st.integers(0, 5)),
    st.tuples(st.just("short"), st.integers(0, 5)),
    st.tuples(st.just("tick"), st.just(0)),
    st.tuples(st.just("alone"), st.just(0)),
    st.tuples(st.just("hold"), st.booleans()),
    st.tuples(st.just("wait"), st.booleans()),
    st.tuples(st.just("turns"), st.booleans()),
)
DIVISIONS = st.sampled_from([UpdateSharding.ALL, UpdateSharding.EVEN])
FAULTS = ["kill", "hang", "short"]


@given(st.booleans(), DIVISIONS, st.lists(EVENTS, max_size=60), SEATS.filter(bool))
def test_whatever_happens_the_job_ends_with_every_step_made_once(
    exact: bool, division: UpdateSharding, events: list[tuple[str, Any]], last: list[int]
) -> None:
    world = World(patient(exact, division=division))
    for kind, what in events:
        happen(world, kind, what)
    world.do(world.team.hold(world.at, held=False))
    world.do(world.team.wait(world.at, waits=False))
    if not world.team.is_over:
        world.order(*last)
        world.run()
    state = world.check_finish()
    assert len(state) == TOTAL


@given(st.booleans(), DIVISIONS, st.lists(EVENTS, max_size=60), st.booleans())
def test_whatever_happens_a_stop_leaves_nothing_and_a_new_team_goes_on(
    exact: bool, division: UpdateSharding, events: list[tuple[str, Any]], checkpoint: bool
) -> None:
    world = World(patient(exact, division=division))
    for kind, what in events:
        happen(world, kind, what)
    done = world.team.done
    world.do(world.team.stop(world.at, checkpoint=checkpoint))
    if not world.team.is_over:
        world.run()
    if world.ended:
        world.check_finish()
        return
    assert [stop.steps for stop in world.stopped] == [len(world.disk[0])] or not checkpoint
    if checkpoint and exact and not any(kind in {"kill", "hang"} for kind, _ in events):
        assert len(world.disk[0]) >= done
    again = World(patient(exact), checkpoints=[StateCopy(len(world.disk[0]), path="x")] if world.disk[0] else [])
    again.disk = world.disk
    again.order(0, 1)
    again.run()
    again.check_finish()


@given(
    st.booleans(),
    DIVISIONS,
    st.lists(st.tuples(st.integers(1, 60), st.sampled_from(FAULTS), st.integers(0, 5)), max_size=8),
)
def test_faults_on_unchanged_devices_change_nothing_of_what_is_learned(
    exact: bool, division: UpdateSharding, faults: list[tuple[int, str, int]]
) -> None:
    """In default mode on like devices: between unlike ones, when parts are dealt anew depends on what was measured."""
    devices = (0, 1, 3) if exact else (0, 1, 2)
    rough = started(exact, *devices, division=division)
    for pause, kind, which in faults:
        for worker in itertools.islice(itertools.cycle(rough.living or [None]), pause):
            if worker is not None:
                worker.act()
                rough.hear(worker)
        happen(rough, kind, which)
    if not rough.team.is_over:
        rough.run()
    assert rough.check_finish() == ("shards" if exact else (12, 12, 12),) * TOTAL
