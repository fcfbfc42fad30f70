"""The life of a job as a table of transitions, and the one function that walks it."""

from __future__ import annotations

from enum import StrEnum

from carpool.core.errors import InvalidTransition
from carpool.core.model import Allocation, Job, JobSpec, Kind, Past, Phase


class Step(StrEnum):
    """What can happen to a job; the words complete the sentence "the job cannot …"."""

    ADMIT = "be admitted to the queue"
    ASSIGN = "be assigned devices"
    RELEASE = "be released"
    CRASH = "crash"
    PAUSE = "be paused"
    RESUME = "be resumed"
    FINISH = "finish"
    FAIL = "fail"
    CANCEL = "be cancelled"


TRANSITIONS: dict[tuple[Phase, Step], Phase] = {
    (Phase.BLOCKED, Step.ADMIT): Phase.WAITING,
    (Phase.WAITING, Step.ASSIGN): Phase.RUNNING,
    (Phase.RUNNING, Step.ASSIGN): Phase.RUNNING,
    (Phase.RUNNING, Step.RELEASE): Phase.WAITING,
    (Phase.RUNNING, Step.CRASH): Phase.WAITING,
    (Phase.WAITING, Step.PAUSE): Phase.PAUSED,
    (Phase.RUNNING, Step.PAUSE): Phase.PAUSED,
    (Phase.PAUSED, Step.RESUME): Phase.WAITING,
    # A terminal fact of the applied generation wins over what was decided since: hence also while waiting or paused.
    (Phase.RUNNING, Step.FINISH): Phase.FINISHED,
    (Phase.WAITING, Step.FINISH): Phase.FINISHED,
    (Phase.PAUSED, Step.FINISH): Phase.FINISHED,
    (Phase.RUNNING, Step.FAIL): Phase.FAILED,
    (Phase.WAITING, Step.FAIL): Phase.FAILED,
    (Phase.PAUSED, Step.FAIL): Phase.FAILED,
    (Phase.BLOCKED, Step.FAIL): Phase.FAILED,
    (Phase.BLOCKED, Step.CANCEL): Phase.CANCELLED,
    (Phase.WAITING, Step.CANCEL): Phase.CANCELLED,
    (Phase.RUNNING, Step.CANCEL): Phase.CANCELLED,
    (Phase.PAUSED, Step.CANCEL): Phase.CANCELLED,
}


def next_phase(job: Job, step: Step) -> Phase:
    """The phase after `step`, or InvalidTransition with the job's story."""
    phase = TRANSITIONS.get((job.phase, step))
    if phase is None:
        story = job.past.tell() if job.past is not None else ()
        raise InvalidTransition(job.id, job.phase, step, story)
    return phase


_BLOCKED, _WAITING, _ASSIGN = Phase.BLOCKED, Phase.WAITING, Step.ASSIGN  # looking members up costs more than a call

Service = tuple[tuple[Kind, float], ...]


def submitted(spec: JobSpec, seq: int, at: float, *, blocked: bool) -> Job:
    """A job at its birth."""
    phase = _BLOCKED if blocked else _WAITING
    return Job(spec, seq, at, phase, as_of=at, since=at, past=Past(at, "was submitted"))


# The functions below spell every field out instead of calling dataclasses.replace: they run several times for each of
# a million jobs, and replace costs four times as much.


def moved(job: Job, at: float, step: Step, service: Service, words: str) -> Job:
    """The job after a step that leaves it without desired devices; what is observed stays until a fact changes it.

    Only a job that held some is given an order by this, and only an order has a generation.
    """
    return Job(
        job.spec,
        job.seq,
        job.submitted_at,
        next_phase(job, step),
        None,
        job.generation if job.desired is None else job.generation + 1,
        job.observed,
        job.applied,
        job.done_at(at),
        0.0,
        at,
        service,
        job.crashes,
        at,
        Past(at, words, job.past),
        0.0,
        job.lane,
    )


def assigned(job: Job, at: float, allocation: Allocation, believed: float, service: Service) -> Job:
    """The job after it was given an allocation that is not yet seen applied; it goes on as before until then."""
    phase = next_phase(job, _ASSIGN)
    return Job(
        job.spec,
        job.seq,
        job.submitted_at,
        phase,
        allocation,
        job.generation + 1,
        job.observed,
        job.applied,
        job.done_at(at) if job.rate else job.done,
        job.rate,
        at,
        service,
        job.crashes,
        job.since if job.desired is not None else at,
        Past(at, f"was given {allocation.num_devices} devices", job.past),
        believed,
        job.lane or allocation.fractions if job.spec.exact else (),
    )


def observed(job: Job, at: float, generation: int, done: float, rate: float, service: Service) -> Job:
    """The job after its backend reported where it stands under `generation`."""
    applies = generation == job.generation and job.desired is not None
    return Job(
        job.spec,
        job.seq,
        job.submitted_at,
        job.phase,
        job.desired,
        job.generation,
        job.desired if applies else job.observed,
        generation,
        done,
        rate,
        at,
        service,
        0 if done > job.done else job.crashes,
        job.since,
        job.past,
        job.believed,
        job.lane,
    )


def vacated(job: Job, at: float, generation: int, done: float, service: Service, *, crashed: bool = False) -> Job:
    """The job after its backend reported that it holds nothing any more; progress makes its crashes begin anew."""
    return Job(
        job.spec,
        job.seq,
        job.submitted_at,
        job.phase,
        job.desired,
        job.generation,
        None,
        generation,
        done,
        0.0,
        at,
        service,
        (0 if done > job.done else job.crashes) + crashed,
        job.since,
        job.past,
        job.believed,
        job.lane,
    )
