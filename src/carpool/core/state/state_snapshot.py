"""State snapshot: the scheduler state as plain JSON values, from which recovery can start."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from carpool.core.errors import JournalError
from carpool.core.journal import (
    Header,
    SkippedItem,
    allocation_from_json,
    allocation_to_json,
    fact_from_json,
    fact_to_json,
    header_from_json,
    header_to_json,
    skipped_item,
    spec_from_json,
    spec_to_json,
)
from carpool.core.messages import OutsidersSeen
from carpool.core.model import Allocation, Job, JobId, Kind, NodeId, Past, Phase
from carpool.core.topology import Cluster
from carpool.core.typed_fields import MAX_INT, shown

SCHEMA = 1
_PROGRESS = ("done", "rate", "believed")  # of a job, as its reports said


class StateSnapshot(NamedTuple):
    """The result of folding all records so far, without what estimators have learned."""

    at: float
    cluster: Cluster
    jobs: tuple[Job, ...]  # that are not over, in order of submission
    lost: frozenset[NodeId] = frozenset()
    running: tuple[JobId, ...] = ()  # in the order of `RunningJobs`
    ended: Mapping[JobId, Phase] = {}
    num_submitted: int = 0
    planned_at: float | None = None  # time of the last plan
    wake_at: float | None = None  # of the last plan
    note: object = None  # of the last plan
    outsiders: tuple[OutsidersSeen, ...] = ()  # foreign processes by device
    policy: str = ""  # the active policy, if it is not the journal's first
    drained: Mapping[NodeId, bool] = {}  # nodes that an operator took out: whether they are lost, too
    policy_fault: str = ""  # failure of the previous policy, if that is why it was replaced


def snapshot_to_json(state: StateSnapshot) -> dict[str, Any]:
    """A state as plain JSON values."""
    return {
        "schema": SCHEMA,
        "at": state.at,
        "cluster": header_to_json(Header("", "", state.cluster)),
        "lost": sorted(state.lost),
        "jobs": [_job_to_json(job) for job in state.jobs],
        "running": state.running,
        "ended": {job: str(phase) for job, phase in state.ended.items()},
        "num_submitted": state.num_submitted,
        "planned_at": state.planned_at,
        "wake_at": state.wake_at,
        "note": state.note,
        "policy": state.policy,
        "policy_fault": state.policy_fault,
        "drained": [[node, is_lost] for node, is_lost in state.drained.items()],
        "outsiders": [fact_to_json(seen) for seen in state.outsiders],
    }


def snapshot_from_json(value: dict[str, Any], skipped: list[SkippedItem] | None = None) -> StateSnapshot:
    """The inverse of `snapshot_to_json`; JournalError for one written by a newer version.

    With `skipped`, jobs with unusable values are listed there: they are left out, or their progress is.
    """
    schema = value.get("schema")
    if not isinstance(schema, int) or schema > SCHEMA:
        raise JournalError(f"state snapshot: schema {schema!r} is not supported (this version reads 1 to {SCHEMA})")
    jobs = tuple(job for given in value["jobs"] if (job := _usable_job(given, skipped)) is not None)
    kept = {job.id for job in jobs}
    lost = {JobId(job["spec"]["id"]) for job in value["jobs"] if job["spec"]["id"] not in kept}
    return StateSnapshot(
        at=value["at"],
        cluster=header_from_json(value["cluster"]).cluster,
        jobs=jobs,
        lost=frozenset(map(NodeId, value["lost"])),
        running=tuple(JobId(job) for job in value["running"] if job in kept),
        ended={JobId(job): Phase(phase) for job, phase in value["ended"].items()} | dict.fromkeys(lost, Phase.FAILED),
        num_submitted=value["num_submitted"],
        planned_at=value["planned_at"],
        wake_at=value["wake_at"],
        note=value["note"],
        policy=value.get("policy", ""),
        policy_fault=value.get("policy_fault", ""),
        drained={NodeId(node): is_lost for node, is_lost in value.get("drained", ())},
        outsiders=tuple(_seen(each) for each in value.get("outsiders", ())),
    )


def _seen(value: dict[str, Any]) -> OutsidersSeen:
    fact = fact_from_json(value)
    assert isinstance(fact, OutsidersSeen)
    return fact


def _job_to_json(job: Job) -> dict[str, Any]:
    """The fields of a job; its history as a list, oldest first."""
    value = job._asdict()
    if not job.probe_steps:
        del value["probe_steps"]  # unknown to older versions
    value["spec"] = spec_to_json(job.spec)
    value["desired"] = _held_to_json(job.desired)
    value["observed"] = _held_to_json(job.observed)
    past: list[tuple[float, str]] = []
    link = job.past
    while link is not None:
        past.append((link.at, link.words))
        link = link.before
    value["past"] = past[::-1]
    return value


def _usable_job(value: dict[str, Any], skipped: list[SkippedItem] | None) -> Job | None:
    """A job of a snapshot; None for one that cannot be decoded. Out-of-range progress is dropped."""
    if skipped is None:
        return _job_from_json(value)
    job = str(value["spec"]["id"])
    bad = [name for name in _PROGRESS if not _is_amount(value.get(name, 0.0))]
    if bad:
        skipped.append(SkippedItem(JobId(job), f"{bad[0]} is {shown(value[bad[0]])} in a snapshot"))
    try:
        return _job_from_json({**value, **dict.fromkeys(bad, 0.0)})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        skipped.append(skipped_item(job, error))
        return None


def _is_amount(value: object) -> bool:
    return isinstance(value, int | float) and 0 <= value <= MAX_INT


def _job_from_json(value: dict[str, Any]) -> Job:
    past: Past | None = None
    for at, words in value["past"]:
        past = Past(at, words, past)
    return Job(
        **{
            **value,
            "spec": spec_from_json(value["spec"]),
            "phase": Phase(value["phase"]),
            "desired": _held_from_json(value["desired"]),
            "observed": _held_from_json(value["observed"]),
            "service": tuple((Kind(kind), seconds) for kind, seconds in value["service"]),
            "past": past,
            "lane": tuple(value["lane"]),
        }
    )


def _held_to_json(held: Allocation | None) -> dict[str, Any] | None:
    return None if held is None else allocation_to_json(held)


def _held_from_json(value: dict[str, Any] | None) -> Allocation | None:
    return None if value is None else allocation_from_json(value)
