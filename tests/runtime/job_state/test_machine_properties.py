"""The state machine with fake workers under random events and faults."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from carpool.runtime.job_state.types import StateCopy
from carpool.runtime.job_state.update_sharding import UpdateSharding
from tests.runtime.job_state.events import happen, options, started
from tests.runtime.job_state.harness import DEVICES, TOTAL, Harness

SLOTS = st.lists(st.sampled_from(sorted(DEVICES)), max_size=4, unique=True)
EVENTS = st.one_of(
    st.tuples(st.just("act"), st.integers(0, 5)),
    st.tuples(st.just("act"), st.integers(0, 5)),
    st.tuples(st.just("hear"), st.integers(0, 5)),
    st.tuples(st.just("hear"), st.integers(0, 5)),
    st.tuples(st.just("rounds"), st.integers(1, 8)),
    st.tuples(st.just("rounds"), st.integers(1, 8)),
    st.tuples(st.just("rounds"), st.integers(1, 8)),
    st.tuples(st.just("order"), SLOTS),
    st.tuples(st.just("kill"), st.integers(0, 5)),
    st.tuples(st.just("hang"), st.integers(0, 5)),
    st.tuples(st.just("out_of_memory"), st.integers(0, 5)),
    st.tuples(st.just("tick"), st.just(0)),
    st.tuples(st.just("grant"), st.just(0)),
    st.tuples(st.just("pause"), st.booleans()),
    st.tuples(st.just("suspend"), st.booleans()),
    st.tuples(st.just("time_slice"), st.booleans()),
)
SHARDINGS = st.sampled_from([UpdateSharding.ALL, UpdateSharding.EVEN])
FAULTS = ["kill", "hang", "out_of_memory"]


@given(st.booleans(), SHARDINGS, st.lists(EVENTS, max_size=60), SLOTS.filter(bool))
def test_after_any_events_the_job_finishes_with_every_step_made_once(
    exact: bool, sharding: UpdateSharding, events: list[tuple[str, Any]], last: list[int]
) -> None:
    harness = Harness(options(exact, update_sharding=sharding))
    for kind, what in events:
        happen(harness, kind, what)
    harness.run_actions(harness.machine.pause(harness.at, paused=False))
    harness.run_actions(harness.machine.suspend(harness.at, suspended=False))
    if not harness.state.is_over:
        harness.order(*last)
        harness.run()
    state = harness.check_finish()
    assert len(state) == TOTAL


@given(st.booleans(), SHARDINGS, st.lists(EVENTS, max_size=60), st.booleans())
def test_after_any_events_a_stop_leaves_no_process_and_the_job_can_resume(
    exact: bool, sharding: UpdateSharding, events: list[tuple[str, Any]], checkpoint: bool
) -> None:
    harness = Harness(options(exact, update_sharding=sharding))
    for kind, what in events:
        happen(harness, kind, what)
    done = harness.state.steps_done
    harness.run_actions(harness.machine.stop(harness.at, checkpoint=checkpoint))
    if not harness.state.is_over:
        harness.run()
    if harness.ended:
        harness.check_finish()
        return
    assert [stop.steps for stop in harness.stopped] == [len(harness.disk[0])] or not checkpoint
    if checkpoint and exact and not any(kind in {"kill", "hang"} for kind, _ in events):
        assert len(harness.disk[0]) >= done
    again = Harness(options(exact), checkpoints=[StateCopy(len(harness.disk[0]), path="x")] if harness.disk[0] else [])
    again.disk = harness.disk
    again.order(0, 1)
    again.run()
    again.check_finish()


@given(
    st.booleans(),
    st.lists(EVENTS, max_size=40),
    SLOTS.filter(bool),
    st.lists(st.tuples(st.sampled_from(["act", "hear", "kill", "hang"]), st.integers(0, 5)), max_size=20),
)
@example(True, [("rounds", 3), *[("tick", 0)] * 4, ("rounds", 1)], [0], [("act", 0), ("hear", 0), ("kill", 0)])
def test_workers_lost_while_a_job_stops_cost_no_step_that_was_copied(
    exact: bool, events: list[tuple[str, Any]], devices: list[int], faults: list[tuple[str, int]]
) -> None:
    harness = started(exact, *devices)
    for kind, what in events:
        happen(harness, kind, what)
    copied = harness.state.copies.step
    harness.run_actions(harness.machine.stop(harness.at, checkpoint=True))
    for kind, what in faults:
        happen(harness, kind, what)
        if kind in {"kill", "hang"}:
            harness.tick()
    if not harness.state.is_over:
        harness.run()
    assert harness.ended or [stop.steps for stop in harness.stopped] == [len(harness.disk[0])]
    assert harness.ended or len(harness.disk[0]) >= copied


@given(
    st.booleans(),
    SHARDINGS,
    st.lists(st.tuples(st.integers(1, 60), st.sampled_from(FAULTS), st.integers(0, 5)), max_size=8),
)
def test_faults_on_unchanged_devices_do_not_change_the_result(
    exact: bool, sharding: UpdateSharding, faults: list[tuple[int, str, int]]
) -> None:
    """Default mode uses equal devices: on heterogeneous ones the split follows measured times."""
    devices = (0, 1, 3) if exact else (0, 1, 2)
    faulty = started(exact, *devices, update_sharding=sharding)
    for pause, kind, which in faults:
        for worker in itertools.islice(itertools.cycle(faulty.alive_workers or [None]), pause):
            if worker is not None:
                worker.act()
                faulty.deliver(worker)
        happen(faulty, kind, which)
    if not faulty.state.is_over:
        faulty.run()
    assert faulty.check_finish() == ("shards" if exact else (12, 12, 12),) * TOTAL
