"""Said again is what an executor may not have heard, and nothing that would change what it has."""

from carpool.core.messages import Assign, Probe, Release
from carpool.core.model import Allocation, Job, JobId, JobSpec, Phase
from carpool.runtime.executor.client_protocol import HeldJobStatus
from carpool.service.daemon.recovery import ResyncActions, is_ahead, reconcile

A, B, C, D = map(JobId, "abcd")


def job(name: JobId, seq: int, generation: int, held: Allocation | None = None, applied: int = 0) -> Job:
    phase = Phase.WAITING if held is None else Phase.RUNNING
    return Job(JobSpec(name), seq, 0.0, phase, held, generation, applied=applied)


def standing(generation: int, *, is_over: bool = False) -> HeldJobStatus:
    return HeldJobStatus(generation, 7, True, is_over)


def test_what_should_be_known_is_introduced_what_was_not_heard_is_ordered_what_is_over_is_forgotten() -> None:
    held = Allocation.of(0)
    jobs = {A: job(A, 0, 2, held), B: job(B, 1, 3), C: job(C, 2, 0), D: job(D, 3, 4, held, applied=4)}
    standings = {A: standing(1), B: standing(3), JobId("gone"): standing(5), JobId("done"): standing(1, is_over=True)}
    assert reconcile(jobs, standings) == ResyncActions(
        introduce=(D,),
        orders=(Assign(A, held, 2), Assign(D, held, 4)),
        forget=(JobId("done"), JobId("gone")),
    )


def test_a_probe_that_was_not_heard_is_given_again_as_a_probe() -> None:
    probed = job(A, 0, 2, Allocation.of(0))._replace(probe_steps=5)
    assert reconcile({A: probed}, {A: standing(1)}).orders == (Assign(A, Allocation.of(0), 2, Probe(5)),)


def test_a_release_that_was_not_heard_is_given_again() -> None:
    assert reconcile({A: job(A, 0, 2)}, {A: standing(1)}).orders == (Release(A, 2),)


def test_an_executor_that_has_heard_more_than_the_books_know_does_not_fit() -> None:
    assert not is_ahead({A: job(A, 0, 2)}, {A: standing(2), B: standing(9)})
    assert is_ahead({A: job(A, 0, 2)}, {A: standing(3)})
