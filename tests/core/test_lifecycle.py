"""The table of transitions: every pair of phase and step either leads somewhere or is refused with the story."""

from itertools import product

import pytest

from carpool.core import lifecycle
from carpool.core.errors import InvalidTransition
from carpool.core.lifecycle import TRANSITIONS, Transition, next_phase
from carpool.core.model import Allocation, Job, JobId, JobSpec, Kind, Past, Phase

STORY = Past(1.0, "was submitted")


def job(phase: Phase = Phase.RUNNING, **changed: object) -> Job:
    return Job(JobSpec(JobId("a"), work=100.0), 0, 0.0, phase, past=STORY)._replace(**changed)  # type: ignore[arg-type]


@pytest.mark.parametrize(("phase", "step"), list(product(Phase, Transition)))
def test_every_pair(phase: Phase, step: Transition) -> None:
    if (phase, step) in TRANSITIONS:
        assert next_phase(job(phase), step) is TRANSITIONS[phase, step]
        return
    with pytest.raises(InvalidTransition) as refused:
        next_phase(job(phase), step)
    assert refused.value.story == ("1.000 s was submitted",)
    assert f"{phase} and cannot {step}" in str(refused.value)


def test_what_is_over_stays_over() -> None:
    assert {phase for phase, _ in TRANSITIONS if phase.is_over} == set()


def test_every_phase_can_end_and_be_reached() -> None:
    for phase in Phase:
        assert phase.is_over or any(start is phase and end.is_over for (start, _), end in TRANSITIONS.items()), (
            f"{phase} has no end"
        )
    assert set(TRANSITIONS.values()) == set(Phase)


def test_only_orders_have_generations() -> None:
    holding = job(desired=Allocation.of(0), generation=3)
    assert lifecycle.moved(holding, 5.0, Transition.RELEASE, (), "was released").generation == 4
    in_place = {
        Phase.BLOCKED: Transition.ADMIT,
        Phase.WAITING: Transition.PAUSE,
        Phase.PAUSED: Transition.RESUME,
    }
    for phase, transition in in_place.items():
        assert lifecycle.moved(job(phase, generation=3), 5.0, transition, (), "…").generation == 3


def test_work_done_is_settled_when_a_job_moves() -> None:
    running = job(desired=Allocation.of(0), generation=1, applied=1, done=10.0, rate=2.0, as_of=4.0)
    released = lifecycle.moved(running, 9.0, Transition.RELEASE, ((Kind("V100"), 5.0),), "was released")
    assert (released.done, released.rate, released.as_of, released.desired) == (20.0, 0.0, 9.0, None)
    assert released.service == ((Kind("V100"), 5.0),)
    assert released.past is not None
    assert released.past.lines() == ("1.000 s was submitted", "9.000 s was released")


def test_a_report_of_the_newest_generation_makes_it_observed() -> None:
    waiting = job(desired=Allocation.of(0), observed=None, generation=2, applied=0)
    assert lifecycle.observed(waiting, 1.0, 2, 0.0, 1.0, ()).observed == Allocation.of(0)
    assert lifecycle.observed(waiting, 1.0, 1, 0.0, 1.0, ()).observed is None


@pytest.mark.parametrize(("done", "crashes"), [(10.0, 3), (9.0, 3), (10.5, 1)])
def test_crashes_are_counted_since_the_last_progress(done: float, crashes: int) -> None:
    running = job(desired=Allocation.of(0), generation=1, applied=1, done=10.0, crashes=2)
    assert lifecycle.vacated(running, 1.0, 1, done, (), crashed=True).crashes == crashes


def test_an_exact_job_remembers_its_first_share() -> None:
    exact = Job(JobSpec(JobId("a"), exact=True), 0, 0.0, Phase.WAITING)
    running = lifecycle.assigned(exact, 0.0, Allocation.of(0, fraction=0.5), 1.0, ())
    assert running.lane == (0.5,)
    released = lifecycle.moved(running, 1.0, Transition.RELEASE, (), "was released")
    back = lifecycle.vacated(released, 2.0, 2, 0.0, ())
    again = lifecycle.assigned(back, 3.0, Allocation.of(1, fraction=0.25), 1.0, ())
    assert again.lane == (0.5,)
    assert lifecycle.observed(again, 4.0, 3, 0.0, 1.0, ()).lane == (0.5,)
    assert lifecycle.assigned(job(Phase.WAITING), 0.0, Allocation.of(0), 1.0, ()).lane == ()


def test_done_and_remaining_never_pass_the_end() -> None:
    running = job(done=90.0, rate=2.0, as_of=10.0)
    assert (running.done_at(12.0), running.done_at(99.0)) == (94.0, 100.0)
    assert (running.remaining_at(12.0), running.remaining_at(99.0)) == (6.0, 0.0)
    endless = running._replace(spec=JobSpec(JobId("b")))
    assert endless.done_at(12.0) == 94.0
    assert endless.remaining_at(12.0) == float("inf")
