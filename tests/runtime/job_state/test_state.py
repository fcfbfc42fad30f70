"""Acknowledgements, retry budget and exclusive requests of a job's state."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from carpool.core.messages import AssignApplied, ReleaseApplied
from carpool.core.model import JobId
from carpool.runtime.job_state.actions import Emit, ReleaseExclusive, RequestExclusive
from carpool.runtime.job_state.state import Acks, ExclusiveRequest, RetryBudget
from carpool.runtime.job_state.types import Target, WorkerSlot

JOB = JobId("a")
PROBE = Target(7, (WorkerSlot(2),), probe=5)


def test_an_order_is_pending_until_it_is_acknowledged() -> None:
    acks = Acks(JOB)
    assert acks.is_pending(Target(1))
    assert acks.assigned(1, 5) == Emit(AssignApplied(JOB, 1, 5.0))
    assert not acks.is_pending(Target(1))
    assert acks.is_pending(Target(2))
    assert acks.released(2, 9) == Emit(ReleaseApplied(JOB, 2, 9.0))
    assert not acks.is_pending(Target(2))


def test_a_job_is_assigned_between_an_assignment_and_a_release() -> None:
    acks = Acks(JOB)
    seen = [acks.is_assigned]
    acks.assigned(1, 0)
    seen.append(acks.is_assigned)
    acks.released(2, 0)
    seen.append(acks.is_assigned)
    assert seen == [False, True, False]


def test_an_end_belongs_to_the_acknowledged_assignment_or_to_the_newest_order() -> None:
    acks = Acks(JOB)
    assert acks.final_generation(Target(3)) == 3
    acks.assigned(3, 0)
    assert acks.final_generation(Target(4)) == 3
    acks.released(4, 0)
    assert acks.final_generation(Target(6)) == 6


def test_losses_in_one_step_add_up_although_earlier_steps_are_replayed() -> None:
    budget = RetryBudget(2)
    assert budget.on_loss(9) == ""
    budget.on_progress(4)
    assert budget.on_loss(9) == ""
    budget.on_progress(9)
    assert "3 times in step 10" in budget.on_loss(9)


@given(st.lists(st.integers(0, 50), unique=True))
def test_losses_in_different_steps_do_not_add_up(steps: list[int]) -> None:
    budget = RetryBudget(2)
    assert [budget.on_loss(step) for step in steps] == [""] * len(steps)


def test_a_completed_step_resets_its_losses() -> None:
    budget = RetryBudget(2)
    assert budget.on_loss(9) == ""
    budget.on_progress(10)
    assert [budget.on_loss(9), budget.on_loss(9)] == ["", ""]
    assert budget.on_loss(9) != ""
    assert budget.max_step == 10


def test_a_probe_requests_exclusive_access_once_and_releases_it_when_measured() -> None:
    request = ExclusiveRequest()
    assert (request.request_for_probe(PROBE), request.is_pending) == ([RequestExclusive(2, release_memory=False)], True)
    assert request.request_for_probe(PROBE) == []
    request.on_granted()
    assert (request.is_pending, request.is_probing(7)) == (False, True)
    assert not request.is_probing(6)
    assert request.on_probe_measured(7) == [ReleaseExclusive()]
    assert not request.is_probing(7)
    assert (request.pending_probe(PROBE), request.request_for_probe(PROBE)) == (0, [])


def test_a_probe_on_several_devices_requests_no_exclusive_access() -> None:
    wide = Target(7, (WorkerSlot(0), WorkerSlot(1)), probe=5)
    request = ExclusiveRequest()
    assert (request.request_for_probe(wide), request.pending_probe(wide)) == ([], 5)


def test_a_cancelled_probe_releases_a_pending_request() -> None:
    request = ExclusiveRequest()
    request.request_for_probe(PROBE)
    assert (request.end_probe(), request.is_pending) == ([ReleaseExclusive()], False)
    assert request.end_probe() == []


def test_exclusive_access_ends_with_the_step_that_had_run_out_of_memory() -> None:
    request = ExclusiveRequest()
    assert (request.request_for_memory(3, 1), request.is_retry) == ([RequestExclusive(1)], True)
    assert request.on_progress(4) == [], "the neighbours are not idle yet"
    request.on_granted()
    assert request.on_progress(3) == []
    assert (request.on_progress(4), request.is_retry) == ([ReleaseExclusive()], False)
    assert request.on_progress(5) == []


def test_cancel_releases_once() -> None:
    request = ExclusiveRequest()
    assert request.cancel() == []
    request.request_for_memory(3, 1)
    assert (request.cancel(), request.is_pending) == ([ReleaseExclusive()], False)
    assert request.cancel() == []
