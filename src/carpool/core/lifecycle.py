"""Job lifecycle: the table of phase transitions, and the changes a user can make to a submitted job."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum

from carpool.core.errors import InvalidTransition
from carpool.core.messages import LimitsChanged, ResumabilityChanged, WeightChanged
from carpool.core.model import Allocation, Job, JobSpec, Kind, Past, Phase

PAUSED = "was paused"  # by its user


class Transition(StrEnum):
    """What can happen to a job; the words complete the sentence "the job cannot …"."""

    ADMIT = "be admitted to the queue"
    ASSIGN = "be assigned devices"
    RELEASE = "be released"
    CRASH = "crash"
    PAUSE = "be paused"
    RESUME = "be resumed"
    BLOCK = "be blocked"
    FINISH = "finish"
    FAIL = "fail"
    CANCEL = "be cancelled"


TRANSITIONS: dict[tuple[Phase, Transition], Phase] = {
    (Phase.BLOCKED, Transition.ADMIT): Phase.WAITING,
    (Phase.WAITING, Transition.ASSIGN): Phase.RUNNING,
    (Phase.RUNNING, Transition.ASSIGN): Phase.RUNNING,
    (Phase.RUNNING, Transition.RELEASE): Phase.WAITING,
    (Phase.RUNNING, Transition.CRASH): Phase.WAITING,
    (Phase.WAITING, Transition.PAUSE): Phase.PAUSED,
    (Phase.RUNNING, Transition.PAUSE): Phase.PAUSED,
    (Phase.PAUSED, Transition.RESUME): Phase.WAITING,
    (Phase.PAUSED, Transition.BLOCK): Phase.BLOCKED,  # resumed while its array is full
    # A terminal fact of the applied generation wins over later decisions, so a job can also end while it holds nothing.
    (Phase.RUNNING, Transition.FINISH): Phase.FINISHED,
    (Phase.WAITING, Transition.FINISH): Phase.FINISHED,
    (Phase.PAUSED, Transition.FINISH): Phase.FINISHED,
    (Phase.BLOCKED, Transition.FINISH): Phase.FINISHED,
    (Phase.RUNNING, Transition.FAIL): Phase.FAILED,
    (Phase.WAITING, Transition.FAIL): Phase.FAILED,
    (Phase.PAUSED, Transition.FAIL): Phase.FAILED,
    (Phase.BLOCKED, Transition.FAIL): Phase.FAILED,
    (Phase.BLOCKED, Transition.CANCEL): Phase.CANCELLED,
    (Phase.WAITING, Transition.CANCEL): Phase.CANCELLED,
    (Phase.RUNNING, Transition.CANCEL): Phase.CANCELLED,
    (Phase.PAUSED, Transition.CANCEL): Phase.CANCELLED,
}


def next_phase(job: Job, transition: Transition) -> Phase:
    """The phase after a transition; InvalidTransition if there is none."""
    phase = TRANSITIONS.get((job.phase, transition))
    if phase is None:
        story = job.past.lines() if job.past is not None else ()
        raise InvalidTransition(job.id, job.phase, transition, story)
    return phase


# Enum lookups cost more than a call.
_BLOCKED, _WAITING, _ASSIGN = Phase.BLOCKED, Phase.WAITING, Transition.ASSIGN

_ASSIGNED = "was assigned "

Service = tuple[tuple[Kind, float], ...]


def submitted(spec: JobSpec, seq: int, at: float, *, blocked: bool) -> Job:
    """A new job."""
    phase = _BLOCKED if blocked else _WAITING
    return Job(spec, seq, at, phase, as_of=at, since=at, past=Past(at, "was submitted"))


# The functions below list every field instead of calling `_replace`, which costs four times as much: they run several
# times for each of a million jobs.


def moved(job: Job, at: float, transition: Transition, service: Service, words: str) -> Job:
    """The job after a transition that leaves it without desired devices; the observed state stays.

    Its generation grows only if it held devices, since only then an order follows.
    """
    return Job(
        job.spec,
        job.seq,
        job.submitted_at,
        next_phase(job, transition),
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


def assigned(
    job: Job, at: float, allocation: Allocation, believed: float, service: Service, probe_steps: int = 0
) -> Job:
    """The job after a new allocation was ordered; its rate stays until that is applied."""
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
        Past(at, f"{_ASSIGNED}{allocation.num_devices} devices", job.past),
        believed,
        job.lane or allocation.fractions if job.spec.exact else (),
        probe_steps,
    )


def assigned_widths(job: Job) -> list[int]:
    """The numbers of devices of its allocations since it last lost them all, newest first."""
    widths: list[int] = []
    link = job.past
    while link is not None and link.words.startswith(_ASSIGNED):
        widths.append(int(link.words.removeprefix(_ASSIGNED).split()[0]))
        link = link.before
    return widths


def observed(job: Job, at: float, generation: int, done: float, rate: float, service: Service) -> Job:
    """The job after its backend reported progress under `generation`."""
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
        job.probe_steps,
    )


def vacated(job: Job, at: float, generation: int, done: float, service: Service, *, crashed: bool = False) -> Job:
    """The job after its backend reported that it holds no devices; progress resets its crash count."""
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
        job.probe_steps,
    )


JobUpdate = WeightChanged | LimitsChanged | ResumabilityChanged


def updated_spec(spec: JobSpec, change: JobUpdate) -> JobSpec:
    """The spec after a change; the number of devices requested moves into the new range."""
    if isinstance(change, WeightChanged):
        return replace(spec, weight=change.weight)
    if isinstance(change, ResumabilityChanged):
        return replace(spec, resumable=change.resumable)
    least, most = change.min_devices, change.max_devices
    return replace(spec, devices=min(max(spec.devices, least), most), min_devices=least, max_devices=most)


def requires_release(change: JobUpdate, held: Allocation | None) -> bool:
    """Whether a job holds more or fewer devices than the new limits allow."""
    if held is None or not isinstance(change, LimitsChanged):
        return False
    return not change.min_devices <= held.num_devices <= change.max_devices


def describe_update(change: JobUpdate) -> str:
    """The change in words, for the job's history."""
    if isinstance(change, WeightChanged):
        return f"weight changed by the user to {change.weight:g}, including priority and quota"
    if isinstance(change, ResumabilityChanged):
        return f"{'keeps' if change.resumable else 'loses'} its work when it is preempted"
    if change.min_devices == change.max_devices:
        return f"device limit changed to {change.max_devices} by the user"
    return f"device limits changed to {change.min_devices}–{change.max_devices} by the user"
