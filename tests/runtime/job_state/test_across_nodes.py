"""The state machine of a job with devices of several nodes: rank 0 and all checkpoints are on the lead."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from carpool.jobs.devices import LocalDevice, RemoteDevice
from carpool.runtime.job_state.types import JobOptions, Target, WorkerSlot, local_first
from tests.runtime.job_state.events import happen, options
from tests.runtime.job_state.harness import TOTAL, Harness

DEVICES: dict[int, LocalDevice] = {
    0: RemoteDevice(0, "other/cpu:0", "cpu1", (0,), host="other"),
    1: LocalDevice(1, "cpu:0", "cpu1", (0,)),
    2: LocalDevice(2, "cpu:1", "cpu1", (1,)),
    3: RemoteDevice(3, "third/cpu:0", "cpu1", (0,), host="third"),
}
HERE = (1, 2)
SLOTS = st.tuples(st.permutations(HERE), st.permutations((0, 3)), st.integers(1, 2), st.integers(0, 2)).map(
    lambda drawn: [*drawn[0][: drawn[2]], *drawn[1][: drawn[3]]]
)
EVENTS = st.one_of(
    st.tuples(st.just("act"), st.integers(0, 5)),
    st.tuples(st.just("hear"), st.integers(0, 5)),
    st.tuples(st.just("rounds"), st.integers(1, 8)),
    st.tuples(st.just("rounds"), st.integers(1, 8)),
    st.tuples(st.just("order"), SLOTS | st.just([])),
    st.tuples(st.just("kill"), st.integers(0, 5)),
    st.tuples(st.just("hang"), st.integers(0, 5)),
    st.tuples(st.just("tick"), st.just(0)),
    st.tuples(st.just("suspend"), st.booleans()),
)


def check_epochs(harness: Harness) -> None:
    for epoch, made in harness.epochs.items():
        remote = [harness.state.is_remote(device) for device in harness.ranks[epoch]]
        assert not remote[0], "rank 0 is on the lead"
        assert {proceed.reducer for proceed in made} == {"group" if any(remote) else "shared"}
        assert not (any(remote) and made[0].update_ranges), "the exchange of updates needs shared memory"


def ahead(exact: bool, ahead_s: float) -> JobOptions:
    return replace(options(exact), ahead_s=ahead_s)


AHEAD_S = st.sampled_from([0.1, 8.0])  # a round of the harness takes half a second: one step at a time, and several


@given(st.booleans(), AHEAD_S, st.lists(EVENTS, max_size=50), SLOTS)
def test_after_any_events_the_job_finishes_with_every_step_made_once(
    exact: bool, ahead_s: float, events: list[tuple[str, Any]], last: list[int]
) -> None:
    harness = Harness(ahead(exact, ahead_s), DEVICES)
    for kind, what in events:
        happen(harness, kind, what)
    harness.run_actions(harness.machine.suspend(harness.at, suspended=False))
    if not harness.state.is_over:
        harness.order(*last)
        harness.run()
    assert len(harness.check_finish()) == TOTAL
    check_epochs(harness)


@given(st.booleans(), AHEAD_S, st.lists(EVENTS, max_size=50))
def test_after_any_events_a_stop_keeps_the_newest_state_on_the_lead(
    exact: bool, ahead_s: float, events: list[tuple[str, Any]]
) -> None:
    harness = Harness(ahead(exact, ahead_s), DEVICES)
    for kind, what in events:
        happen(harness, kind, what)
    done = harness.state.steps_done
    harness.run_actions(harness.machine.stop(harness.at, checkpoint=True))
    if not harness.state.is_over:
        harness.run()
    if not harness.ended:
        assert [stop.steps for stop in harness.stopped] == [len(harness.disk[0])]
        if exact and not any(kind in {"kill", "hang"} for kind, _ in events):
            assert len(harness.disk[0]) >= done


def test_slots_of_other_nodes_come_last_with_their_parts() -> None:
    target = Target(1, tuple(map(WorkerSlot, (0, 1, 3, 2))), parts=(1, 2, 3, 4))
    ordered = local_first(target, lambda device: device not in HERE)
    assert [slot.device for slot in ordered.slots] == [1, 2, 0, 3]
    assert ordered.parts == (2, 4, 1, 3)


def without_its_lead_worker() -> Harness:
    """An exact job over two nodes that makes steps, and whose worker on the lead has died."""
    harness = Harness(options(True), DEVICES)
    harness.order(1, 0)
    happen(harness, "rounds", 12)
    assert harness.state.steps_done > 0
    next(worker for worker in harness.alive_workers if worker.device == 1).alive = False
    happen(harness, "rounds", 3)
    return harness


def test_remote_workers_wait_for_a_worker_on_the_lead() -> None:
    harness = without_its_lead_worker()
    harness.run()
    harness.check_finish()
    check_epochs(harness)


def test_a_state_that_only_a_remote_worker_has_is_saved_on_the_lead() -> None:
    harness = without_its_lead_worker()
    done = harness.state.newest_step
    harness.run_actions(harness.machine.stop(harness.at, checkpoint=True))
    harness.run()
    assert [stop.steps for stop in harness.stopped] == [len(harness.disk[0])]
    assert len(harness.disk[0]) == done > 0


def test_short_steps_are_granted_several_at_a_time_and_a_change_waits_for_them() -> None:
    harness = Harness(ahead(exact=True, ahead_s=8.0), DEVICES)
    harness.order(1, 0)
    for _ in range(100):
        happen(harness, "rounds", 1)
        harness.tick()
        if harness.state.epoch is not None and harness.state.epoch.last_grant > 1:
            break
    epoch = harness.state.epoch
    assert epoch is not None
    granted = epoch.granted
    assert granted > epoch.step + 1
    harness.order(1)
    happen(harness, "rounds", 3)
    assert epoch.halting
    assert epoch.granted <= granted + 1, "the change is made after at most one step more"
    harness.run()
    assert len(harness.check_finish()) == TOTAL


def test_a_job_says_once_why_its_updates_are_not_shared_across_nodes() -> None:
    harness = Harness(options(True), DEVICES)
    for devices in ((1, 0), (1, 3)):
        harness.order(*devices)
        for _ in range(100):
            happen(harness, "rounds", 1)
            if harness.state.epoch is not None and set(harness.state.epoch.layout.devices) == set(devices):
                break
    assert [note for note in harness.notes if "all parameters" in note] == [
        "every device updates all parameters: devices can share an update only within one machine"
    ]
